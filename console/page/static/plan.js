// The plan of a form's settings, made anew a moment after the last key; an answer that comes late is dropped.
"use strict";

const WAIT_MS = 350;

function showPlan(form, place, told) {
  const [answer, price] = place.querySelectorAll("p");
  place.dataset.kind = told.error ? "bad" : told.kind;
  answer.textContent = told.error ? told.error.message : told.answer;
  price.textContent = told.error ? "" : told.price || "";
  place.querySelector("pre").textContent = told.error ? "" : told.why.join("\n");
  const take = place.querySelector("button");
  take.hidden = Boolean(told.error) || !Object.keys(changes(form, told)).length;
  take.onclick = () => {
    for (const [name, value] of Object.entries(changes(form, told))) form.elements[`settings.${name}`].value = value;
    form.dispatchEvent(new Event("input"));
  };
}

// What the proposal sets otherwise than the form's fields.
function changes(form, told) {
  const found = {};
  for (const [name, value] of Object.entries(told.settings || {})) {
    const field = form.elements[`settings.${name}`];
    if (field && value !== null && field.value !== String(value)) found[name] = value;
  }
  return found;
}

function limitSlider(form, longest) {
  const slider = form.querySelector("[data-context-slider]");
  if (slider === null || !longest || slider.max === String(longest)) return;
  slider.max = longest;
  const number = document.getElementById(slider.dataset.with);
  slider.value = number.value === "" ? longest : number.value;
}

for (const form of document.querySelectorAll("form[data-plan]")) {
  const place = form.querySelector(".verdict");
  let asked = 0, timer = null;
  const plan = async () => {
    const body = bodyOf(form), mine = ++asked;
    if (form.dataset.planModel) body.model_id = Number(form.dataset.planModel);
    if (!body.source && !body.model_id) return;
    place.setAttribute("aria-busy", "true");
    const settings = Object.fromEntries(Object.entries(body.settings ?? {}).filter(([, value]) => value !== null));
    const told = await send("POST", form.dataset.plan, { source: body.source, model_id: body.model_id, settings });
    if (mine !== asked) return;
    place.removeAttribute("aria-busy");
    showPlan(form, place, told);
    limitSlider(form, told.max_model_len_limit);
  };
  const soon = () => { clearTimeout(timer); timer = setTimeout(plan, WAIT_MS); };
  form.addEventListener("input", soon);
  const holder = form.closest("details");
  if (holder === null || holder.open) plan();
  else holder.addEventListener("toggle", () => { if (holder.open) plan(); }, { once: true });
}
