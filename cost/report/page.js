"use strict";
// Draws the timeline and the memory curve of one rank on one canvas, with one time axis that zooms and moves.
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("timeline");
const tip = document.getElementById("tip");
const choice = document.getElementById("rank");
const FONT = "12px system-ui, sans-serif";
const FAINTEST = 0.15;  // least opacity of a bar, which is the paler, the more of its time is idle
const ROW = 24, HEAD = 22, MEMORY = 190, GAP = 30, PAD = 10;
let rank = choice ? Number(choice.value) : 0, from = 0, to = data.seconds, left = 90, drag = null;

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (s) => (s >= 1 || !s ? +s.toFixed(6) + " s" : s >= 1e-3 ? +(s * 1e3).toFixed(4) + " ms" : +(s * 1e6).toFixed(2) + " µs");
const seconds = (s) => (s >= 1 ? (s).toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(3) + " ms" : (s * 1e6).toFixed(1) + " µs");
const size = (b) => (b >= 2 ** 30 ? (b / 2 ** 30).toFixed(2) + " GiB" : b >= 2 ** 20 ? (b / 2 ** 20).toFixed(1) + " MiB" : (b / 1024).toFixed(1) + " KiB");

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * base).find((s) => s >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k++) found.push(k * step);
  return found;
}

function geometry() {
  const tracks = data.ranks[rank].tracks;
  const width = canvas.clientWidth;
  const c = canvas.getContext("2d");
  c.font = FONT;
  left = Math.min(Math.max(64, ...tracks.map((track) => c.measureText(track.name).width + 16)), width / 3);
  const memory = HEAD + tracks.length * ROW + GAP;
  return { tracks, width, memory, height: memory + MEMORY + 26, plot: width - left - PAD };
}

const x = (t, g) => left + ((t - from) / (to - from)) * g.plot;

function draw() {
  const g = geometry(), scale = window.devicePixelRatio || 1, c = canvas.getContext("2d");
  canvas.style.height = g.height + "px";
  canvas.width = Math.round(g.width * scale);
  canvas.height = Math.round(g.height * scale);
  c.setTransform(scale, 0, 0, scale, 0, 0);
  c.font = FONT;
  c.textBaseline = "middle";
  const ink = color("--ink"), soft = color("--soft"), rule = color("--rule");
  for (const t of ticks(from, to, Math.max(3, g.plot / 130))) {
    c.fillStyle = rule;
    c.fillRect(x(t, g), HEAD - 4, 1, g.height - HEAD - 16);
    c.fillStyle = soft;
    c.fillText(short(t), Math.min(x(t, g) + 3, g.width - 60), 10);
  }
  g.tracks.forEach((track, row) => {
    const top = HEAD + row * ROW;
    c.save();
    c.beginPath();
    c.rect(left, top, g.plot, ROW);
    c.clip();
    drawBars(c, track.bars, top, g);
    c.restore();
    c.fillStyle = soft;
    c.fillText(fitted(c, track.name, left - 12), 8, top + ROW / 2);
  });
  drawMemory(c, g, { ink, soft, rule });
}

function drawBars(c, bars, top, g) {
  let done = -1, look = null;
  for (let i = 0; i < bars.length; i += 7) {
    const end = bars[i] + bars[i + 1];
    if (end < from) continue;
    if (bars[i] > to) break;
    const a = x(bars[i], g), b = Math.max(x(end, g), a + 0.6);
    if (b < done && look === bars[i + 4]) continue;  // hidden behind what was drawn
    const share = bars[i + 6] ? bars[i + 6] / bars[i + 1] : 1;
    c.fillStyle = color("--" + data.looks[bars[i + 4]]);
    c.globalAlpha = Math.max(FAINTEST, share);
    c.fillRect(a, top + 2, b - a > 3 ? b - a - 0.5 : b - a, ROW - 5);
    c.globalAlpha = 1;
    done = Math.ceil(b * 2) / 2;
    look = bars[i + 4];
    if (b - a > 46 && share > 0.85) {  // on paler bars neither black nor white is easy to read
      c.fillStyle = "#000";
      const start = Math.max(a, left) + 4;
      c.fillText(fitted(c, data.texts[bars[i + 3]] + " · " + data.texts[bars[i + 2]], b - start - 4), start, top + ROW / 2);
    }
  }
}

function fitted(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const mid = (low + high + 1) >> 1;
    if (c.measureText(text.slice(0, mid) + "…").width <= width) low = mid; else high = mid - 1;
  }
  return low > 2 ? text.slice(0, low) + "…" : "";
}

function drawMemory(c, g, colors) {
  const memory = data.ranks[rank].memory, at = memory.at, top = g.memory, bottom = top + MEMORY;
  const most = Math.max(...memory.total) * 1.06 || 1;
  const y = (bytes) => bottom - (bytes / most) * MEMORY;
  const base = new Array(at.length).fill(0);
  c.save();
  c.beginPath();
  c.rect(left, top - 14, g.plot, MEMORY + 16);
  c.clip();
  memory.categories.forEach((name, place) => {
    const values = memory.values[place];
    c.beginPath();
    for (let i = 0; i < at.length; i++) {
      const here = x(at[i], g), next = x(i + 1 < at.length ? at[i + 1] : data.seconds, g);
      c.lineTo(here, y(base[i] + values[i]));
      c.lineTo(next, y(base[i] + values[i]));
    }
    for (let i = at.length - 1; i >= 0; i--) {
      const here = x(at[i], g), next = x(i + 1 < at.length ? at[i + 1] : data.seconds, g);
      c.lineTo(next, y(base[i]));
      c.lineTo(here, y(base[i]));
      base[i] += values[i];
    }
    c.fillStyle = color("--m" + memory.looks[place]);
    c.fill();
  });
  const peak = memory.total.indexOf(Math.max(...memory.total)), px = x(at[peak], g);
  if (px >= left && px <= left + g.plot) {
    c.fillStyle = colors.ink;
    c.fillRect(px, y(memory.total[peak]) - 4, 1, 4);
    const label = "peak " + size(memory.total[peak]), wide = c.measureText(label).width;
    c.fillText(label, Math.min(px + 4, g.width - PAD - wide), y(memory.total[peak]) - 7);
  }
  c.restore();
  c.fillStyle = colors.soft;
  for (const mark of ticks(0, most / 2 ** 30, 4)) {
    c.fillText(mark < 10 && mark % 1 ? mark.toPrecision(2) : mark.toFixed(0), left - 32, y(mark * 2 ** 30));
    c.fillStyle = colors.rule;
    c.fillRect(left - 5, y(mark * 2 ** 30), 5, 1);
    c.fillStyle = colors.soft;
  }
  c.fillText("GiB active", 8, top - 8);
  c.fillStyle = colors.rule;
  c.fillRect(left, bottom, g.plot, 1);
}

function move(low, high) {
  const least = data.seconds / 1e6, width = Math.min(data.seconds, Math.max(least, high - low));
  from = Math.min(Math.max(0, low), data.seconds - width);
  to = from + width;
  draw();
}

function zoom(factor, place) {
  const center = place === undefined ? (from + to) / 2 : place;
  move(center - (center - from) * factor, center + (to - center) * factor);
}

function timeAt(event) {
  const g = geometry(), box = canvas.getBoundingClientRect();
  return from + ((event.clientX - box.left - left) / g.plot) * (to - from);
}

function hovered(event) {
  const g = geometry(), box = canvas.getBoundingClientRect(), row = Math.floor((event.clientY - box.top - HEAD) / ROW);
  const t = timeAt(event);
  if (row >= 0 && row < g.tracks.length) {
    const bars = g.tracks[row].bars, slack = (1.5 / g.plot) * (to - from);
    for (let i = 0; i < bars.length; i += 7) {
      if (bars[i] - slack <= t && t <= bars[i] + bars[i + 1] + slack) {
        const whole = seconds(bars[i + 1]), busy = bars[i + 6] ? seconds(bars[i + 6]) : whole;
        return [data.texts[bars[i + 3]], data.texts[bars[i + 2]],
          data.looks[bars[i + 4]] + ", " + (busy === whole ? whole : busy + " of " + whole),
          "from " + seconds(bars[i]), data.texts[bars[i + 5]]].filter(Boolean);
      }
    }
  } else if (event.clientY - box.top > g.memory) {
    const memory = data.ranks[rank].memory;
    let i = 0;
    while (i + 1 < memory.at.length && memory.at[i + 1] <= t) i++;
    const parts = memory.categories.map((name, place) => [memory.values[place][i], name]).filter((p) => p[0] > 0);
    parts.sort((a, b) => b[0] - a[0]);
    return [size(memory.total[i]) + " at " + seconds(Math.max(0, t)), ...parts.map((p) => p[1] + ": " + size(p[0]))];
  }
  return null;
}

canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.shiftKey && !event.altKey) return;  // the page scrolls
  event.preventDefault();
  zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, timeAt(event));
}, { passive: false });
canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(event)));
canvas.addEventListener("pointerdown", (event) => { drag = { at: event.clientX, from, to }; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", () => { drag = null; });
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
canvas.addEventListener("pointermove", (event) => {
  const g = geometry();
  if (drag) {
    const by = ((event.clientX - drag.at) / g.plot) * (drag.to - drag.from);
    move(drag.from - by, drag.to - by);
    return;
  }
  const lines = hovered(event);
  if (!lines) { tip.style.display = "none"; return; }
  tip.replaceChildren(...lines.map((line, i) => {
    const item = document.createElement(i ? "div" : "b");
    item.textContent = line;
    return item;
  }));
  tip.style.display = "block";
  const box = canvas.getBoundingClientRect(), dx = event.clientX - box.left, dy = event.clientY - box.top;
  tip.style.left = Math.max(4, Math.min(dx + 14, g.width - tip.offsetWidth - 6)) + "px";
  tip.style.top = dy + 16 + "px";
});
canvas.addEventListener("keydown", (event) => {
  const by = (to - from) * 0.2;
  const known = { ArrowLeft: () => move(from - by, to - by), ArrowRight: () => move(from + by, to + by), "+": () => zoom(0.7), "-": () => zoom(1.4), 0: () => move(0, data.seconds) };
  if (known[event.key]) { event.preventDefault(); known[event.key](); }
});
document.getElementById("in").addEventListener("click", () => zoom(0.5));
document.getElementById("out").addEventListener("click", () => zoom(2));
document.getElementById("all").addEventListener("click", () => move(0, data.seconds));
if (choice) choice.addEventListener("change", () => { rank = Number(choice.value); draw(); });
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
