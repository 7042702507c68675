// Follows a log: new lines every second, those that do not match are hidden.
"use strict";

const POLL_MS = 1000, MOST_LINES = 5000;
const LEVELS = ["debug", "info", "warning", "error"];
const log = document.getElementById("log"), follow = document.getElementById("follow"), count = document.getElementById("count");
const words = document.getElementById("q"), level = document.getElementById("level");

function filter(line) {
  const isLow = LEVELS.indexOf(line.dataset.level) < LEVELS.indexOf(level.value);
  line.hidden = isLow || !line.textContent.toLowerCase().includes(words.value.toLowerCase());
}

function filterAll() {
  let shown = 0;
  for (const line of log.children) { filter(line); shown += !line.hidden; }
  count.textContent = `${shown} of ${log.children.length} lines`;
}

function toEnd() { if (follow.checked) log.scrollTop = log.scrollHeight; }

async function more() {
  try {
    const answer = await fetch(`${log.dataset.source}?after=${encodeURIComponent(log.dataset.after)}`);
    const told = await answer.json();
    document.getElementById("problem").textContent = told.error ? told.error.message : "";
    if (!told.error && told.lines.length) {
      for (const each of told.lines) {
        const line = document.createElement("div");
        line.dataset.level = each.level;
        line.textContent = each.text;
        log.append(line);
      }
      while (log.children.length > MOST_LINES) log.firstElementChild.remove();
      log.dataset.after = told.after;
      filterAll();
      toEnd();
    }
    document.getElementById("quiet").hidden = log.children.length > 0;
  } catch {
    document.getElementById("problem").textContent = "The console does not answer; the log goes on when it does.";
  }
  setTimeout(more, POLL_MS);
}

if (log !== null) {
  words.addEventListener("input", filterAll);
  level.addEventListener("input", filterAll);
  words.form.querySelector("button").hidden = true;
  words.form.elements.service.addEventListener("change", () => words.form.submit());
  follow.addEventListener("input", toEnd);
  log.addEventListener("wheel", () => { follow.checked = log.scrollTop + log.clientHeight >= log.scrollHeight - 4; });
  filterAll();
  toEnd();
  setTimeout(more, POLL_MS);
}
