const field = document.querySelector("#filter"), count = document.querySelector("#shown");
const table = document.querySelector("section:last-of-type table"), body = table.tBodies[0];
const rows = [...body.rows].map((row) => ({ row, text: row.textContent.toLowerCase() }));
function show() {
  const words = field.value.toLowerCase().split(/\s+/);
  let shown = 0;
  for (const { row, text } of rows) {
    row.hidden = !words.every((word) => text.includes(word));
    shown += !row.hidden;
  }
  count.textContent = `${shown} of ${rows.length} runs`;
}
function key(row, place) {
  const text = row.cells[place].textContent.trim(), value = parseFloat(text.replace(/,/g, ""));
  return Number.isNaN(value) || /^\d{4}-/.test(text) ? text : value;
}
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a < b ? -1 : a > b ? 1 : 0;
}
[...table.tHead.rows[0].cells].forEach((head, place) => {
  const button = document.createElement("button");
  button.textContent = head.textContent;
  head.replaceChildren(button);
  button.onclick = () => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
    const sorted = rows.map(({ row }) => row);
    sorted.sort((a, b) => sign * compare(key(a, place), key(b, place)));
    body.append(...sorted);
  };
});
field.parentElement.hidden = false;
field.oninput = show;
show();
