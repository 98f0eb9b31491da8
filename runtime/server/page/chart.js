// A line chart of the last minutes in SVG: axes with units and round ticks, a legend with the newest values.

import { make } from "./turn_view.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 170; // px, of the drawing
const MARGIN = { left: 44, right: 10, top: 10, bottom: 26 };
const X_STEPS_S = [15, 30, 60, 120];
const MIN_TICK_PX = 56;
const MAX_GAP_S = 5; // a longer pause is a gap in the lines

function draw(tag, attributes, text) {
  const shape = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
  if (text !== undefined) shape.textContent = text;
  return shape;
}

// The least of 1, 2, 5, 10, 20, ... (and their tenths) with which at most five steps reach `max`.
export function roundStep(max) {
  const power = 10 ** Math.floor(Math.log10(max / 5));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step * 5 >= max * 0.999999);
}

export class Chart {
  // title; unit: of the values; names: one per line; seconds: the span of time; max: the top of the axis, null for as
  // much as the values need.
  constructor(figure, { title, unit, names, seconds, max = null }) {
    Object.assign(this, { title, unit, names, seconds, max });
    this.svg = draw("svg", { role: "img" });
    this.legend = make("ul", "legend");
    this.values = names.map((name, index) => {
      const item = make("li");
      const value = make("b", "", "–");
      item.append(make("i", `swatch line${index}`), `${name} `, value);
      this.legend.append(item);
      return value;
    });
    const caption = make("figcaption", "", title);
    caption.append(make("span", "", unit));
    figure.append(caption, this.svg, this.legend);
    this.points = [];
    new ResizeObserver(() => this.show()).observe(figure);
  }

  // Adds the values of a moment, one per line; `time` in seconds.
  add(time, values) {
    this.points.push({ time, values });
    while (this.points[0].time < time - this.seconds) this.points.shift();
    this.show();
  }

  show() {
    const width = this.svg.clientWidth;
    if (width === 0) return; // not in view
    const right = width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const top = this.max ?? Math.max(5, ...this.points.flatMap(({ values }) => values));
    const step = roundStep(top);
    const end = this.max ?? step * Math.ceil(top / step - 1e-6);
    const now = this.points.at(-1)?.time ?? 0;
    const x = (time) => right - ((now - time) / this.seconds) * (right - MARGIN.left);
    const y = (value) => bottom - (value / end) * (bottom - MARGIN.top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...this.yAxis(step, end, y, right), ...this.xAxis(right, bottom), ...this.lines(x, y));
    this.describe();
  }

  yAxis(step, end, y, right) {
    const shapes = [];
    for (let value = 0; value <= end * 1.000001; value += step) {
      const line = value === 0 ? "axis" : "grid";
      shapes.push(draw("line", { class: line, x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }));
      shapes.push(draw("text", { class: "ytick", x: MARGIN.left - 6, y: y(value) + 4 }, value.toLocaleString("en", { notation: "compact" })));
    }
    return shapes;
  }

  xAxis(right, bottom) {
    const width = right - MARGIN.left;
    const step = X_STEPS_S.find((s) => (s / this.seconds) * width >= MIN_TICK_PX) ?? this.seconds;
    const shapes = [];
    for (let ago = 0; ago <= this.seconds; ago += step) {
      const x = right - (ago / this.seconds) * width;
      shapes.push(draw("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      const place = ago === 0 ? "xtick last" : ago === this.seconds ? "xtick first" : "xtick";
      shapes.push(draw("text", { class: place, x, y: bottom + 18 }, ago === 0 ? "now" : `−${ago} s`));
    }
    return shapes;
  }

  lines(x, y) {
    return this.names.map((_, index) => {
      const path = this.points.map(({ time, values }, i) => {
        const isBehindGap = i === 0 || time - this.points[i - 1].time > MAX_GAP_S;
        return `${isBehindGap ? "M" : "L"}${x(time).toFixed(1)} ${y(values[index]).toFixed(1)}`;
      });
      return draw("path", { class: `series line${index}`, d: path.join("") });
    });
  }

  describe() {
    const last = this.points.at(-1)?.values ?? [];
    last.forEach((value, index) => {
      this.values[index].textContent = value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
    });
    const now = this.names.map((name, index) => `${name} ${this.values[index].textContent}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title} (${this.unit}), the last ${this.seconds} seconds; now ${now}`);
  }
}
