"use strict";
// A heat map on a canvas: latency upwards, time to the right, and a colour for the number of requests per second. Redrawn when
// data or the colour scheme changes.

const SPAN = 120;
const STEPS = 24;

/** The colours of the ramp, from few requests to many. */
function ramp() {
  const style = getComputedStyle(document.documentElement);
  const stops = [0, 1, 2, 3].map((i) => {
    const digits = style.getPropertyValue("--heat-" + i).trim();
    return [1, 3, 5].map((at) => parseInt(digits.slice(at, at + 2), 16));
  });
  return Array.from({ length: STEPS }, (_, i) => {
    const at = i / (STEPS - 1) * (stops.length - 1);
    const stop = Math.min(Math.floor(at), stops.length - 2);
    const mixed = stops[stop].map((from, k) => Math.round(from + (stops[stop + 1][k] - from) * (at - stop)));
    return `rgb(${mixed})`;
  });
}

class Heat {
  /** `most` is the element that shows the upper end of the ramp. */
  constructor(canvas, most) {
    this.canvas = canvas;
    this.most = most;
    this.bounds = [];
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", () => { this.colors = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(canvas);
    this.clear();
  }

  clear() {
    this.columns = [];
  }

  /** Adds the counts of the last `seconds`, by latency. */
  add(bounds, seconds, counts) {
    const now = performance.now() / 1000;
    this.bounds = bounds;
    this.columns.push({ from: now - seconds, to: now, rates: counts.map((count) => count / seconds) });
    while (this.columns.length && this.columns[0].to < now - SPAN) this.columns.shift();
    this.draw();
  }

  /** Sizes the canvas for the screen's pixels. */
  fit() {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const scale = window.devicePixelRatio;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    const cx = this.canvas.getContext("2d");
    cx.setTransform(scale, 0, 0, scale, 0, 0);
    cx.clearRect(0, 0, width, height);
    return [cx, width, height];
  }

  draw() {
    if (this.bounds.length === 0 || this.canvas.clientWidth === 0) return;
    this.colors ??= ramp();
    const [cx, width, height] = this.fit();
    const now = this.columns.length ? this.columns[this.columns.length - 1].to : performance.now() / 1000;
    const [left, bottom, buckets] = [52, height - 18, this.bounds.length + 1];
    const row = bottom / buckets;
    const x = (at) => left + (width - left) * (1 - (now - at) / SPAN);
    let most = 0;
    for (const { rates } of this.columns) for (const rate of rates) most = Math.max(most, rate);
    const scale = (STEPS - 1) / Math.log1p(most);
    for (const { from, to, rates } of this.columns) {
      const start = Math.max(left, Math.floor(x(from)));
      const end = Math.ceil(x(to));
      rates.forEach((rate, bucket) => {
        if (rate === 0) return;
        cx.fillStyle = this.colors[Math.round(Math.log1p(rate) * scale)];
        const top = Math.round(bottom - (bucket + 1) * row);
        cx.fillRect(start, top, end - start, Math.round(bottom - bucket * row) - top);
      });
    }
    this.axes(cx, width, left, bottom, row);
    put(this.most, most === 0 ? "–" : `${whole(Math.ceil(most))} (logarithmic)`);
  }

  axes(cx, width, left, bottom, row) {
    const style = getComputedStyle(this.canvas);
    cx.fillStyle = style.color;
    cx.font = "11px " + style.fontFamily;
    cx.textAlign = "right";
    cx.textBaseline = "middle";
    this.bounds.forEach((ns, i) => { if (i % 3 === 0) cx.fillText(time(ns), left - 6, bottom - (i + 1) * row); });
    cx.globalAlpha = 0.35;
    cx.fillRect(left, bottom, width - left, 1);
    cx.textBaseline = "bottom";
    for (let ago = SPAN; ago >= 0; ago -= 30) {
      const at = left + (width - left) * (1 - ago / SPAN);
      cx.globalAlpha = 0.35;
      cx.fillRect(Math.min(at, width - 1), bottom, 1, 4);
      cx.globalAlpha = 1;
      cx.textAlign = ago === SPAN ? "left" : ago === 0 ? "right" : "center";
      cx.fillText(ago === 0 ? "now" : `−${ago} s`, at, bottom + 18);
    }
  }
}
