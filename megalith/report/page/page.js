"use strict";
const tip = document.getElementById("tip");
const SHOWN = 12, SIZE = 1000, DRAG = 5;
const view = {x: null, log: false, smoothing: 0, tokens: false};

// [step, tokens, step, tokens, …] of each run that has them.
const tokensOf = [...document.querySelectorAll("button[data-toggle]")].map((button) => button.dataset.tokens?.split(" ").map(Number));

function across(step, run) {
  const known = view.tokens && tokensOf[run];
  if (!known) return step;
  let n = 2;
  while (n < known.length - 2 && known[n] < step) n += 2;
  const share = (step - known[n - 2]) / (known[n] - known[n - 2] || 1);
  return known[n - 1] + share * (known[n + 1] - known[n - 1]);
}

function mean(points, window) {
  const half = Math.min(window, points.length - 1) >> 1;
  return points.map(([step], n) => {
    const reach = Math.min(half, n, points.length - 1 - n);
    const near = points.slice(n - reach, n + reach + 1);
    return [step, near.reduce((sum, [, y]) => sum + y, 0) / near.length];
  });
}

function ticks([low, high], log) {
  if (log) {
    const from = Math.ceil(Math.log10(low) - 1e-9), to = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((to - from) / 6));
    const powers = Array.from({length: Math.max(0, to - from + 1)}, (_, n) => 10 ** (from + n));
    if (powers.length > 1) return powers.filter((_, n) => n % every === 0);
  }
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((each) => each >= rough);
  const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1;
  return Array.from({length: Math.max(0, count)}, (_, n) => (first + n) * step);
}

function short(value, all) {
  const far = Math.max(...all.map(Math.abs)), near = all.length > 1 ? Math.abs(all[1] - all[0]) : far;
  const digits = Math.min(12, Math.max(3, Math.ceil(Math.log10(far / near || 1)) + 1));
  const [size, unit] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return Number((value / size).toPrecision(digits)) + unit;
}

// The part of an axis that values fill. A logarithmic one has the positive values.
function limits(values, log, margin) {
  const shown = log ? values.filter((value) => value > 0).map(Math.log10) : values;
  if (!shown.length) return null;
  let low = shown.reduce((a, b) => Math.min(a, b)), high = shown.reduce((a, b) => Math.max(a, b));
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high), 1e-290)) [low, high] = [low - 0.5, high + 0.5];
  const more = margin * (high - low), ends = [low - more, high + more];
  return log ? ends.map((value) => 10 ** value) : ends;
}

class Chart {
  constructor(plot) {
    this.plot = plot;
    const [left, right] = plot.dataset.x.split(" ").map(Number), [low, high] = plot.dataset.y.split(" ").map(Number);
    this.drawn = {x: [left, right], y: [low, high]};
    this.grid = plot.querySelector(".grid");
    this.first = {grid: this.grid.getAttribute("d"), labels: [...plot.querySelectorAll("span")], style: plot.getAttribute("style")};
    this.paths = [...plot.querySelectorAll("path:not(.grid)")].map((path) => {
      const d = path.getAttribute("d"), run = Number(path.dataset.run);
      const places = d.split(/[MLhV]/).map((pair) => pair.split(" ").map(Number)).filter((pair) => pair.length === 2);
      const points = places.map(([x, y]) => [left + (right - left) * x / SIZE, high - (high - low) * y / SIZE]);
      return {path, d, run, points, shown: points, mark: path.classList.contains("mark"), dots: path.classList.contains("dots"),
        faint: path.classList.contains("faint")};
    });
    this.at = {...this.drawn};
  }

  get curves() { return this.paths.filter((each) => !each.mark); }

  update() {
    for (const each of this.curves) {
      const window = Math.round(each.points.length * view.smoothing / 100);
      each.shown = each.dots || each.faint || window < 2 ? each.points : mean(each.points, window);
    }
    if (!view.x && !view.log && !view.tokens && !view.smoothing) return this.restore();
    const steps = this.curves.flatMap((each) => each.points.map(([step]) => across(step, each.run)));
    const x = view.x ?? (view.tokens ? limits(steps, false, 0) : this.drawn.x);
    const inside = this.curves.filter((each) => !each.faint).flatMap((each) =>
      each.shown.filter(([step]) => { const at = across(step, each.run); return at >= x[0] && at <= x[1]; }).map(([, y]) => y));
    const log = view.log && inside.some((value) => value > 0);
    this.at = {x, y: (view.x || log ? limits(inside, log, 0.05) : null) ?? this.drawn.y, log};
    for (const each of this.paths) each.path.setAttribute("d", this.line(each));
    this.label();
  }

  place(step, value, run) {
    const {x, y, log} = this.at, scale = log ? Math.log10 : Number;
    const up = log && value <= 0 ? 0 : (scale(value) - scale(y[0])) / (scale(y[1]) - scale(y[0]));
    return [SIZE * (across(step, run) - x[0]) / (x[1] - x[0] || 1), SIZE * (1 - up)];
  }

  line({points, shown, run, mark, dots, path}) {
    const places = (mark ? points : shown).map(([step, y]) => this.place(step, y, run).map((each) => each.toFixed(2)));
    if (mark) return `M${places[0][0]} 0V${SIZE}`;
    return dots ? places.map(([x, y]) => `M${x} ${y}h0`).join("") : `M${places.map((pair) => pair.join(" ")).join("L")}`;
  }

  label() {
    for (const one of this.plot.querySelectorAll("span")) one.remove();
    const {x, y, log} = this.at, rows = ticks(y, log), columns = ticks(x, false), reach = x[1] - x[0];
    const height = (value) => this.place(0, value, 0)[1];
    this.grid.setAttribute("d", rows.map((value) => `M0 ${height(value).toFixed(1)}H${SIZE}`).join(""));
    const texts = rows.map((value) => short(value, log ? [value] : rows));
    this.plot.style.setProperty("--labels", Math.max(1, ...texts.map((each) => each.length)));
    const put = (kind, text, edge, place) => {
      const label = document.createElement("span");
      label.className = kind; label.textContent = text; label.style[edge] = `${place / SIZE * 100}%`;
      this.plot.append(label);
    };
    rows.forEach((value, n) => put("y", texts[n], "top", height(value)));
    for (const value of columns) put("x", short(value, columns), "left", SIZE * (value - x[0]) / (reach || 1));
  }

  restore() {
    this.at = {...this.drawn};
    this.grid.setAttribute("d", this.first.grid);
    this.plot.setAttribute("style", this.first.style);
    for (const {path, d} of this.paths) path.setAttribute("d", d);
    for (const one of this.plot.querySelectorAll("span")) one.remove();
    this.plot.append(...this.first.labels);
  }

  value(event) {
    const box = this.plot.getBoundingClientRect(), [left, right] = this.at.x;
    return left + (right - left) * (event.clientX - box.left) / box.width;
  }

  show(event) {
    const at = this.value(event), curves = this.curves.filter(({path}) => !path.classList.contains("off")).slice(0, SHOWN);
    tip.replaceChildren(...curves.map(({path, shown, run}) => {
      const distance = ([step]) => Math.abs(across(step, run) - at);
      const [step, y] = shown.reduce((best, point) => distance(point) < distance(best) ? point : best);
      const line = document.createElement("div"), tokens = view.tokens && tokensOf[run];
      const where = `step ${Math.round(step)}${tokens ? `, ${short(across(step, run), [across(step, run)])} tokens` : ""}`;
      line.textContent = `${path.dataset.name}: ${Number(y.toPrecision(4))} at ${where}`;
      return line;
    }));
    tip.hidden = curves.length === 0;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  }
}

const charts = [...document.querySelectorAll(".plot")].map((plot) => new Chart(plot));
const reset = document.querySelector("[data-reset]");

function update() {
  reset.hidden = !view.x;
  for (const chart of charts) chart.update();
}

for (const chart of charts) {
  const {plot} = chart;
  let begun = null;
  plot.addEventListener("pointermove", (event) => chart.show(event));
  plot.addEventListener("pointerleave", () => { tip.hidden = true; begun = null; });
  plot.addEventListener("pointerdown", (event) => { if (event.pointerType !== "touch") begun = event; });
  plot.addEventListener("pointerup", (event) => {
    if (begun && Math.abs(event.clientX - begun.clientX) > DRAG) {
      view.x = [chart.value(begun), chart.value(event)].sort((a, b) => a - b);
      update();
    }
    begun = null;
  });
  plot.addEventListener("dblclick", () => { view.x = null; update(); });
}
document.querySelector("[data-log]").addEventListener("change", (event) => { view.log = event.target.checked; update(); });
document.querySelector("[data-smoothing]").addEventListener("input", (event) => {
  view.smoothing = Number(event.target.value);
  update();
});
document.querySelector("[data-align]")?.addEventListener("change", (event) => {
  view.tokens = event.target.checked;
  view.x = null;
  update();
});
reset.addEventListener("click", () => { view.x = null; update(); });
for (const button of document.querySelectorAll("button[data-toggle]")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    for (const one of document.querySelectorAll(`[data-run="${button.dataset.toggle}"]`)) one.classList.toggle("off", !on);
  });
}
document.documentElement.dataset.ready = document.querySelectorAll("figure.chart").length;
