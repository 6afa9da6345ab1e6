"use strict";
// Draws the curves that have their points in the page, and shows the values under the pointer or the cursor keys.
const HEIGHT = 230, LEFT = 62, RIGHT = 18, TOP = 12, BOTTOM = 28;
// A name at the end of a curve: the most letters of it, and the pixels of a letter and of a line.
const LETTERS = 14, LETTER = 6.2, LINE = 13;
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, text, made = document.createElement(name)) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function draw(name, attributes, text) {
  return make(name, attributes, text, document.createElementNS(SVG, name));
}

function short(name) {
  return name.length > LETTERS ? name.slice(0, LETTERS - 1) + "…" : name;
}

// Returns the exponential mean of a curve up to each point, of which the first is not drawn towards zero.
function smoothed(points, part) {
  let sum = 0, weight = 0;
  return points.map(([x, y]) => {
    sum = part * sum + (1 - part) * y;
    weight = part * weight + 1 - part;
    return [x, sum / weight];
  });
}

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(5)));
}

function roundTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find(factor => raw <= factor * power * (1 + 1e-9));
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9; n++) ticks.push(n * step + 0);
  return ticks;
}

function logTicks(low, high) {
  const factors = high > 2000 * low ? [1] : [1, 2, 5], ticks = [];
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  for (let power = first; power <= last; power += Math.ceil((last - first) / 8))
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  return ticks.length > 1 ? ticks : roundTicks(low, high, 4);
}

// A page that reloads itself keeps what its reader has chosen. Where a browser has no such memory, it begins anew.
const CHOICES = `deltatune ${location.pathname}`;
function recalled() {
  try {
    return JSON.parse(sessionStorage.getItem(CHOICES)) || {};
  } catch {
    return {};
  }
}
// A fold is told by its heading, whose number of answers grows.
function heading(fold) {
  return fold.querySelector("summary").textContent.replace(/[\d,]+ answers/, "answers");
}
function remember() {
  const folds = [...document.querySelectorAll("details")].map(fold => [heading(fold), fold.open]);
  const logarithmic = charts.filter(chart => chart.chosen !== undefined).map(chart => [chart.plot.title, chart.chosen]);
  const focused = charts.find(chart => chart.svg === document.activeElement);
  const kept = {folds, logarithmic, smoothing: slider.value, focused: focused && focused.plot.title, at: focused && focused.at, y: scrollY};
  try {
    sessionStorage.setItem(CHOICES, JSON.stringify(kept));
  } catch {
    return;
  }
}

class Chart {
  constructor(plot, chosen) {
    this.plot = plot;
    // Whether the reader chose a log axis. Until then it follows the values: a hundredfold fall needs one.
    this.chosen = chosen;
    // The iteration whose values are shown; undefined for the last one.
    this.at = undefined;
    this.figure = make("figure", {});
    const caption = make("figcaption", {});
    caption.append(make("span", {class: "title"}, plot.title));
    this.button = make("button", {type: "button"}, "log axis");
    this.button.hidden = !plot.curves.some(curve => curve.points.some(([, y]) => y > 0));
    caption.append(this.button);
    this.svg = draw("svg", {role: "slider", tabindex: 0, "aria-label": `${plot.title}: iteration`});
    this.values = make("div", {class: "values"});
    this.figure.append(caption, this.svg, this.values);
    this.button.addEventListener("click", () => {
      this.chosen = !this.logarithmic;
      this.draw();
    });
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerdown", event => this.point(event));
    for (const left of ["pointerleave", "blur"])
      this.svg.addEventListener(left, () => {
        this.at = undefined;
        this.draw();
      });
    this.svg.addEventListener("keydown", event => this.press(event));
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const part = ((event.clientX - box.left) / box.width * this.width - LEFT) / (this.width - LEFT - this.margin);
    this.at = Math.min(Math.max(part, 0), 1) * this.right;
    this.draw();
  }

  press(event) {
    const all = [...new Set(this.shown().flatMap(curve => curve.points.map(([x]) => x)))].sort((a, b) => a - b);
    const at = this.at ?? this.right;
    const found = {
      ArrowLeft: () => all.findLast(x => x < at) ?? all[0],
      ArrowRight: () => all.find(x => x > at) ?? all[all.length - 1],
      Home: () => all[0],
      End: () => all[all.length - 1],
      Escape: () => undefined,
    }[event.key];
    if (!found) return;
    event.preventDefault();
    this.at = found();
    this.draw();
  }

  shown() {
    const drawable = ([, y]) => !this.logarithmic || y > 0;
    return this.plot.curves
      .map(curve => ({...curve, points: curve.points.filter(drawable)}))
      .filter(curve => curve.points.length);
  }

  // Chooses the kind of the y axis and its range; `low` and `high` are logarithms where it is logarithmic.
  axis() {
    const all = this.plot.curves.flatMap(curve => curve.points.map(([, y]) => y));
    const least = all.reduce((a, b) => Math.min(a, b)), most = all.reduce((a, b) => Math.max(a, b));
    this.logarithmic = this.chosen ?? (!this.plot.zero && least > 0 && most > 100 * least);
    this.button.setAttribute("aria-pressed", this.logarithmic);
    this.scale = this.logarithmic ? Math.log : y => y;
    const ys = this.shown().flatMap(curve => curve.points.map(([, y]) => this.scale(y)));
    this.low = ys.reduce((a, b) => Math.min(a, b));
    this.high = ys.reduce((a, b) => Math.max(a, b));
    const linear = !this.logarithmic;
    if (linear && this.plot.zero) this.low = Math.min(0, this.low);
    if (this.high - this.low <= 1e-9 * Math.max(Math.abs(this.high), Math.abs(this.low))) {
      const pad = linear ? Math.abs(this.high) * 0.1 || 1 : 0.1;
      this.low -= pad;
      this.high += pad;
      return;
    }
    const room = (this.high - this.low) * 0.06;
    // Where no value is negative, the margin does not make the axis negative.
    this.low -= linear && this.low >= 0 ? Math.min(room, this.low) : room;
    this.high += room;
  }

  across(x) {
    return LEFT + x / this.right * (this.width - LEFT - this.margin);
  }

  down(y) {
    return HEIGHT - BOTTOM - (this.scale(y) - this.low) / (this.high - this.low) * (HEIGHT - TOP - BOTTOM);
  }

  draw() {
    this.axis();
    const curves = this.shown();
    const longest = Math.max(0, ...curves.map(curve => short(curve.label).length));
    this.margin = longest ? longest * LETTER + 12 : RIGHT;
    this.right = Math.max(1, ...curves.map(curve => curve.points[curve.points.length - 1][0]));
    this.width = Math.max(260, this.svg.clientWidth);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.grid();
    const part = Number(slider.value);
    for (const curve of curves) {
      const softened = part > 0 && !curve.dots && curve.points.length > 2;
      this.line(curve, curve.points, softened ? "faint" : "");
      curve.drawn = softened ? smoothed(curve.points, part) : curve.points;
      if (softened) this.line(curve, curve.drawn, "");
      if (curve.dots || curve.points.length === 1) for (const point of curve.points) this.dot(curve, point, 3);
      if (curve.best && curve.points.length > 1) this.best(curve);
    }
    this.names(curves.filter(curve => curve.label));
    this.readOut(curves);
  }

  line(curve, points, more) {
    const at = points.map(([x, y]) => `${this.across(x).toFixed(1)},${this.down(y).toFixed(1)}`);
    this.svg.append(draw("polyline", {class: `line ${more} c${curve.colour % 6}`, points: at.join(" ")}));
  }

  // Marks the lowest point of a curve.
  best(curve) {
    const [x, y] = curve.points.reduce((a, b) => b[1] < a[1] ? b : a);
    const across = this.across(x), down = this.down(y), late = across > (this.width - this.margin) * 0.7;
    this.svg.append(draw("circle", {class: `ring c${curve.colour % 6}`, cx: across, cy: down, r: 5.5}));
    const at = {class: "best", x: across + (late ? 4 : -4), y: Math.max(down - 10, TOP + 8), "text-anchor": late ? "end" : "start"};
    this.svg.append(draw("text", at, `best ${number(y)}`));
  }

  // Writes the names of curves behind their ends, one below the other where these are close.
  names(curves) {
    const ends = curves.map(curve => [this.down(curve.drawn[curve.drawn.length - 1][1]) + 4, curve]).sort(([a], [b]) => a - b);
    let next = Math.min(TOP, HEIGHT - BOTTOM - LINE * ends.length);
    ends.forEach(([at, curve], place) => {
      next = Math.min(Math.max(at, next), HEIGHT - BOTTOM - LINE * (ends.length - 1 - place));
      const name = {class: `name c${curve.colour % 6}`, x: this.width - this.margin + 7, y: next};
      this.svg.append(draw("text", name, short(curve.label)));
      next += LINE;
    });
  }

  grid() {
    const {width, low, high} = this;
    for (const y of this.logarithmic ? logTicks(Math.exp(low), Math.exp(high)) : roundTicks(low, high, 4)) {
      const at = this.down(y);
      this.svg.append(draw("line", {class: "grid", x1: LEFT, x2: width - this.margin, y1: at, y2: at}));
      this.svg.append(draw("text", {x: LEFT - 7, y: at + 4, "text-anchor": "end"}, number(y)));
    }
    for (const x of roundTicks(0, this.right, width / 110).filter(Number.isInteger)) {
      const text = x.toLocaleString("en");
      // The last number may be as long as the margin to its right is not.
      const at = Math.min(this.across(x), width - 3.5 * text.length);
      this.svg.append(draw("text", {x: at, y: HEIGHT - 9, "text-anchor": "middle"}, text));
    }
    this.svg.append(draw("text", {x: LEFT - 8, y: HEIGHT - 9, "text-anchor": "end"}, "iteration"));
  }

  dot(curve, [x, y], r) {
    this.svg.append(draw("circle", {class: `dot c${curve.colour % 6}`, cx: this.across(x), cy: this.down(y), r}));
  }

  // Shows each curve's value nearest to the chosen iteration, or its last one.
  readOut(curves) {
    const at = this.at ?? this.right;
    const nearest = curves.map(curve =>
      [curve, curve.points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)]);
    if (this.at !== undefined) {
      for (const [curve, point] of nearest) this.dot(curve, point, 4);
      const x = this.across(at);
      this.svg.append(draw("line", {class: "at", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM}));
    }
    const said = nearest.map(([{name}, [x, y]]) => `${name} ${number(y)} at iteration ${x.toLocaleString("en")}`.trim());
    this.values.textContent = said.join(" · ");
    const told = {valuemin: 0, valuemax: this.right, valuenow: Math.round(at), valuetext: said.join(", ")};
    for (const [name, value] of Object.entries(told)) this.svg.setAttribute(`aria-${name}`, value);
  }
}

const kept = recalled();
const axes = new Map(kept.logarithmic), folds = new Map(kept.folds);
const slider = make("input", {type: "range", min: 0, max: 0.98, step: 0.02, value: kept.smoothing ?? 0});
const charts = JSON.parse(document.getElementById("curves").textContent).map(plot => new Chart(plot, axes.get(plot.title)));
const figures = document.getElementById("figures");
if (charts.length) {
  const smoothing = make("label", {class: "smoothing"}, "smoothing ");
  smoothing.append(slider);
  figures.append(smoothing, ...charts.map(chart => chart.figure));
  slider.addEventListener("input", () => charts.forEach(chart => chart.draw()));
}
for (const fold of document.querySelectorAll("details")) fold.open = folds.get(heading(fold)) ?? fold.open;
for (const chart of charts) chart.draw();
const focused = charts.find(chart => chart.plot.title === kept.focused);
if (focused) {
  focused.svg.focus({preventScroll: true});
  focused.at = kept.at ?? undefined;
  focused.draw();
}
if (kept.y) scrollTo(0, kept.y);
addEventListener("resize", () => charts.forEach(chart => chart.draw()));
addEventListener("pagehide", remember);
