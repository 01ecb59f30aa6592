"use strict";
const tip = document.getElementById("tip");
const SHOWN = 12;

// What a curve has nearest to a place of its chart, which is 1000 wide and high.
function nearest(path, x) {
  path.places ??= path.getAttribute("d").split(/[MLh]/).map((pair) => pair.split(" ").map(Number))
    .filter((pair) => pair.length === 2);
  return path.places.reduce((best, place) => Math.abs(place[0] - x) < Math.abs(best[0] - x) ? place : best);
}

function show(event) {
  const plot = event.currentTarget, box = plot.getBoundingClientRect();
  const [left, right] = plot.dataset.x.split(" ").map(Number), [low, high] = plot.dataset.y.split(" ").map(Number);
  const x = 1000 * (event.clientX - box.left) / box.width;
  const curves = [...plot.querySelectorAll("path[data-name]:not(.off)")].slice(0, SHOWN);
  tip.replaceChildren(...curves.map((path) => {
    const [at, y] = nearest(path, x), line = document.createElement("div");
    const step = Math.round(left + (right - left) * at / 1000), value = high - (high - low) * y / 1000;
    line.textContent = `${path.dataset.name}: ${Number(value.toPrecision(4))} at step ${step}`;
    return line;
  }));
  tip.hidden = curves.length === 0;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

for (const plot of document.querySelectorAll(".plot")) {
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerleave", () => { tip.hidden = true; });
}
for (const button of document.querySelectorAll("button[data-toggle]")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    for (const one of document.querySelectorAll(`[data-run="${button.dataset.toggle}"]`)) one.classList.toggle("off", !on);
  });
}
document.documentElement.dataset.ready = document.querySelectorAll("figure.chart").length;
