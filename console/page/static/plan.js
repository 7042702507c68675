// The plan of a form's settings, made anew a moment after the last key; an answer that comes late is dropped.
"use strict";

const WAIT_MS = 350;

function showPlan(place, told) {
  const [answer, price] = place.querySelectorAll("p"), why = place.querySelector("ul");
  place.dataset.kind = told.error ? "bad" : told.kind;
  answer.textContent = told.error ? told.error.message : told.answer;
  price.textContent = told.error ? "" : told.price || "";
  why.replaceChildren(...(told.error ? [] : told.why).map((line) => {
    const item = document.createElement("li");
    item.textContent = line;
    return item;
  }));
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
    const told = await send("POST", form.dataset.plan, { source: body.source, model_id: body.model_id, settings: body.settings ?? {} });
    if (mine !== asked) return;
    place.removeAttribute("aria-busy");
    showPlan(place, told);
    limitSlider(form, told.max_model_len_limit);
  };
  const soon = () => { clearTimeout(timer); timer = setTimeout(plan, WAIT_MS); };
  form.addEventListener("input", soon);
  const holder = form.closest("details");
  if (holder === null || holder.open) plan();
  else holder.addEventListener("toggle", () => { if (holder.open) plan(); }, { once: true });
}
