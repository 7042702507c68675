// What every page does: keeps its values up to date, and sends what buttons and forms say.
// Values of others are only ever set as text or as one of the attributes below.
"use strict";

const ATTRIBUTES = new Set(["x", "width", "d", "value", "max", "disabled", "hidden", "data-kind", "data-time",
  "aria-current", "aria-label", "href", "title", "x1", "x2", "data-send", "data-body", "selected"]);
const ADDRESSES = new Set(["href", "data-send"]);
const STALE_S = 10, RETRY_MS = [500, 1000, 2000, 5000];

// --- values ---------------------------------------------------------------------------------

function look(scope, path) {
  return path.split(".").reduce((found, name) => (found === null || found === undefined ? found : found[name]), scope);
}

function setAttribute(element, name, value) {
  if (!ATTRIBUTES.has(name)) throw new Error(`page: ${name} is not an attribute that values set`);
  if (ADDRESSES.has(name) && value && !/^\/(?!\/)/.test(String(value))) return;
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : String(value));
}

// Fill an element and what is in it from `scope`; inside a list, from the list's item.
function fill(element, scope) {
  if (element.dataset.each !== undefined) {
    fillList(element, look(scope, element.dataset.each) || []);
    return;
  }
  if (element.dataset.text !== undefined) {
    const value = look(scope, element.dataset.text), text = value === null || value === undefined ? "" : String(value);
    if (element.textContent !== text) element.textContent = text;
    element.classList.toggle("unknown", text === "unknown");
  }
  for (const pair of (element.dataset.attr || "").split(" ")) {
    if (!pair) continue;
    const [name, path] = pair.split(":");
    setAttribute(element, name, look(scope, path));
  }
  for (const child of element.children) if (child.tagName !== "TEMPLATE") fill(child, scope);
}

function fillList(list, items) {
  const template = [...list.children].find((child) => child.tagName === "TEMPLATE");
  const rows = new Map([...list.children].filter((child) => child.dataset.key !== undefined).map((child) => [child.dataset.key, child]));
  let before = null;
  for (const item of items) {
    const key = String(item.key);
    let row = rows.get(key);
    rows.delete(key);
    if (row === undefined) {
      row = template.content.firstElementChild.cloneNode(true);
      row.dataset.key = key;
    }
    const place = before === null ? list.firstElementChild : before.nextElementSibling;
    if (place !== row) list.insertBefore(row, place);
    fill(row, item);
    before = row;
  }
  for (const row of rows.values()) row.remove();
}

// --- freshness ------------------------------------------------------------------------------

let clockOffset_s = 0;

function shownAge(age_s) {
  if (age_s < 100) return `${Math.round(age_s)} s`;
  return age_s < 6000 ? `${Math.round(age_s / 60)} min` : `${Math.round(age_s / 3600)} h`;
}

function showAges() {
  const now_s = Date.now() / 1000 + clockOffset_s;
  for (const part of document.querySelectorAll("[data-time]")) {
    const age_s = now_s - Number(part.dataset.time), isStale = age_s > STALE_S;
    part.classList.toggle("stale", isStale);
    const label = part.querySelector(".age");
    if (label !== null) label.textContent = isStale ? `${shownAge(age_s)} old` : "";
  }
}

// --- one stream a page ----------------------------------------------------------------------

const dot = document.querySelector("[data-link]");
let state = {}, lastHeard_ms = Date.now(), failures = 0, isConnected = false;

function showLink() {
  if (dot === null) return;
  const silent_s = (Date.now() - lastHeard_ms) / 1000;
  const kind = isConnected && silent_s < STALE_S ? "live" : silent_s < STALE_S ? "late" : "lost";
  dot.dataset.link = kind;
  const text = { live: "live", late: "connecting", lost: `no answer for ${shownAge(silent_s)}` }[kind];
  if (dot.textContent !== text) dot.textContent = text;
}

function fillAll() {
  if (Object.keys(state).length === 0) return;
  for (const root of document.querySelectorAll("[data-live]")) fill(root, state);
}

function take(event) {
  lastHeard_ms = Date.now();
  isConnected = true;
  failures = 0;
  const told = JSON.parse(event.data);
  clockOffset_s = told.now_s - Date.now() / 1000;
  state = event.type === "snapshot" ? told : { ...state, ...told };
  fillAll();
  document.dispatchEvent(new CustomEvent("state", { detail: state }));
  showAges();
  showLink();
}

function connect(address) {
  const source = new EventSource(address);
  for (const kind of ["snapshot", "change"]) source.addEventListener(kind, take);
  source.onerror = () => {
    isConnected = false;
    source.close();
    showLink();
    setTimeout(() => connect(address), RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
  };
}

// --- what is sent ---------------------------------------------------------------------------

async function send(method, address, body) {
  let answer;
  try {
    answer = await fetch(address, {
      method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), credentials: "same-origin",
    });
  } catch {
    return { error: { message: "The console did not answer. Is it still running?", param: null } };
  }
  const text = await answer.text();
  let told = {};
  try { told = text ? JSON.parse(text) : {}; } catch { told = { error: { message: text.slice(0, 500), param: null } }; }
  if (answer.ok) return told;
  return told.error ? told : { error: { message: `The console answered with status ${answer.status}.`, param: null } };
}

// A field that is empty is left out, so that the console chooses; where a form changes what there
// is, it is null, which takes the value away.
function valueOf(field) {
  if (field.type === "checkbox") return field.checked;
  const text = field.value.trim();
  if (text === "") return field.form.dataset.method === "PATCH" && field.name.includes(".") ? null : undefined;
  return field.type === "number" || field.dataset.type === "number" ? Number(text) : text;
}

function bodyOf(form) {
  const body = {};
  for (const field of form.elements) {
    if (!field.name || field.disabled || (field.type === "radio" && !field.checked)) continue;
    const value = valueOf(field);
    if (value === undefined) continue;
    const steps = field.name.split("."), last = steps.pop();
    let place = body;
    for (const step of steps) place = place[step] ??= {};
    place[last] = value;
  }
  return body;
}

function showError(form, error) {
  for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  const place = form.querySelector(".error");
  if (place !== null) place.textContent = error ? error.message : "";
  if (!error || !error.param) return;
  const name = String(error.param).split(".").pop();
  const field = [...form.elements].find((each) => each.name && each.name.split(".").pop() === name);
  if (field) { field.setAttribute("aria-invalid", "true"); field.focus(); }
}

async function submit(form) {
  const buttons = [...form.querySelectorAll("button")].filter((button) => !button.disabled);
  for (const button of buttons) button.disabled = true;
  const told = await send(form.dataset.method || "POST", form.dataset.send, bodyOf(form));
  for (const button of buttons) button.disabled = false;
  fillAll();
  showError(form, told.error);
  if (told.error) return;
  for (const field of form.elements) delete field.dataset.typed;
  form.dispatchEvent(new CustomEvent("sent", { detail: told, bubbles: true }));
  if (form.dataset.then) location.assign(form.dataset.then.replace("{id}", encodeURIComponent(told.id ?? "")));
}

async function press(button) {
  const place = button.closest("[data-place]")?.querySelector(".error") ?? null;
  button.disabled = true;
  const told = await send(button.dataset.method || "POST", button.dataset.send, JSON.parse(button.dataset.body || "{}"));
  button.disabled = false;
  fillAll();
  if (place !== null) place.textContent = told.error ? told.error.message : "";
  if (!told.error && button.dataset.then) location.assign(button.dataset.then);
}

document.addEventListener("submit", (event) => {
  if (event.target.dataset.send === undefined) return;
  event.preventDefault();
  submit(event.target);
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-send]");
  if (button !== null && button.type === "button") press(button);
});
// What was typed stays: values that come later leave such a field alone.
document.addEventListener("input", (event) => { event.target.dataset.typed = ""; });

// A delete is possible once the name is typed.
for (const form of document.querySelectorAll("form[data-confirm]")) {
  const field = form.querySelector("input[name=confirm]"), button = form.querySelector("button.danger");
  const follow = () => { button.disabled = field.value !== form.dataset.confirm; };
  field.addEventListener("input", follow);
  follow();
}
// A slider and the number beside it are one value.
for (const slider of document.querySelectorAll("input[type=range][data-with]")) {
  const number = document.getElementById(slider.dataset.with);
  slider.addEventListener("input", () => {
    number.value = slider.value;
    number.dispatchEvent(new Event("input", { bubbles: true }));
  });
  number.addEventListener("input", () => { if (number.value !== "") slider.value = number.value; });
}

if (document.body.dataset.events) connect(document.body.dataset.events);
setInterval(() => { showAges(); showLink(); }, 1000);
showAges();
showLink();
