// Every page of the pool as a cell of a map: spans side by side in the order of their addresses, pages in them as
// wide as their bytes.

import { bytes, FORMATS, sum } from "./text.js";

const GAP = 3;
const STATES = ["open", "sealed", "shared", "cached", "pinned", "encoding", "fenced", "free", "reserved"];
const MEANING = {
  open: "takes more tokens",
  sealed: "full",
  shared: "held by several sequences",
  cached: "an idle prefix, given up when asked for",
  pinned: "on its way to or from the spill store",
  encoding: "being re-encoded",
  fenced: "given back during the step in flight",
  free: "free",
  reserved: "kept for re-encoding",
};

export class PoolMap {
  constructor(canvas, describe) {
    this.canvas = canvas;
    this.describe = describe;
    this.mode = "format";
    this.pool = null;
    this.cursor = null; // { span, cell }
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.select(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.select(null));
  }

  show(pool) {
    this.pool = pool;
    this.draw();
    if (this.cursor) this.tell();
  }

  // As many columns as keep the map about as high as it should be.
  layout(width) {
    const spans = this.pool.map.spans.length;
    const narrow = width < 560;
    const most = narrow ? 320 : 264;
    const least = this.pool.map.spans_a_cell > 1 ? 3 : narrow ? 30 : 44;
    let found = null;
    for (let height = 16; height >= 5; height--) {
      const rows = Math.max(1, Math.floor(most / (height + GAP)));
      const columns = Math.ceil(spans / rows);
      const span = (width - (columns - 1) * GAP) / columns;
      found = { height, columns, span };
      if (span >= least) break;
    }
    // Too many for that height: higher, rather than illegible.
    if (found.span < least) {
      found.columns = Math.max(1, Math.floor((width + GAP) / (least + GAP)));
      found.span = (width - (found.columns - 1) * GAP) / found.columns;
    }
    found.rows = Math.ceil(spans / found.columns);
    found.total = found.rows * (found.height + GAP) - GAP;
    return found;
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(this.canvas.parentElement).paddingLeft);
    if (!this.pool || width <= 0) return;
    const place = (this.place = this.layout(width));
    const ratio = window.devicePixelRatio || 1;
    const canvas = this.canvas;
    canvas.style.height = `${place.total}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(place.total * ratio);
    const paper = canvas.getContext("2d");
    paper.scale(ratio, ratio);
    this.palette = this.colors();
    const looks = this.pool.map.kinds.map((kind) => this.look(kind));
    this.pool.map.spans.forEach((span, index) => this.drawSpan(paper, span, this.corner(index), looks));
    this.drawCursor(paper);
  }

  corner(index) {
    const { columns, span, height } = this.place;
    const [column, row] = [index % columns, Math.floor(index / columns)];
    return [column * (span + GAP), row * (height + GAP)];
  }

  // Width of a cell of a span.
  step(span) {
    const { span_bytes: spanBytes, pages_a_cell: pages } = this.pool.map;
    return span[0] === 0 ? this.place.span : (span[0] * pages * this.place.span) / spanBytes;
  }

  drawSpan(paper, span, [left, top], looks) {
    const step = this.step(span);
    const right = left + this.place.span;
    const height = this.place.height;
    let cell = 0;
    for (let index = 1; index < span.length; index += 2) {
      const look = looks[span[index]];
      const from = Math.round(left + cell * step);
      cell += span[index + 1];
      const to = Math.round(Math.min(left + cell * step, right));
      paper.fillStyle = look.color;
      paper.globalAlpha = look.alpha;
      paper.fillRect(from, top, to - from, height);
      paper.globalAlpha = 1;
      if (look.hatched) this.hatch(paper, from, top, to - from, height);
    }
    if (step < 4 || span[0] === 0) return;
    paper.fillStyle = this.palette.surface;
    for (let line = 1; line < cell; line++) {
      paper.fillRect(Math.round(left + line * step) - 1, top, 1, height);
    }
  }

  hatch(paper, left, top, width, height) {
    paper.save();
    paper.beginPath();
    paper.rect(left, top, width, height);
    paper.clip();
    paper.strokeStyle = this.palette.surface;
    paper.lineWidth = 1.2;
    paper.beginPath();
    for (let x = left - height; x < left + width; x += 4) {
      paper.moveTo(x, top + height);
      paper.lineTo(x + height, top);
    }
    paper.stroke();
    paper.restore();
  }

  drawCursor(paper) {
    if (!this.cursor || this.cursor.span >= this.pool.map.spans.length) return;
    const span = this.pool.map.spans[this.cursor.span];
    const [left, top] = this.corner(this.cursor.span);
    const step = this.step(span);
    const from = left + this.cursor.cell * step;
    const width = Math.min(step, left + this.place.span - from);
    paper.strokeStyle = this.palette.ink;
    paper.lineWidth = 2;
    paper.strokeRect(from, top, Math.max(width, 3), this.place.height);
  }

  colors() {
    const style = getComputedStyle(this.canvas);
    const read = (name) => style.getPropertyValue(name).trim();
    const palette = { ink: read("--ink"), surface: read("--surface"), dark: read("--dark") === "1" };
    for (const name of [...FORMATS, ...STATES]) palette[name] = read(`--${name}`);
    return palette;
  }

  look(kind) {
    const palette = this.palette;
    if (kind.format === undefined) {
      return { color: palette[kind.state], alpha: 1, hatched: kind.state === "fenced" };
    }
    const hatched = kind.state === "cached" || kind.state === "pinned";
    if (this.mode === "state") return { color: palette[kind.state], alpha: 1, hatched: false };
    if (this.mode === "owner") {
      if (kind.request === undefined) return { color: palette.cached, alpha: 1, hatched };
      if (kind.request === "several") return { color: palette.shared, alpha: 1, hatched: false };
      return { color: ownerColor(kind.request, palette.dark), alpha: 1, hatched };
    }
    return { color: palette[kind.format], alpha: kind.state === "open" ? 0.6 : 1, hatched };
  }

  // What the colors mean now: `[className or color, name, bytes]`.
  legend() {
    const { accounts, held, requests } = this.pool;
    const rest = [
      ["free", "free", accounts.free_bytes],
      ["fenced", "behind the fence", accounts.fenced_bytes],
      ["reserved", "kept for re-encoding", accounts.reserved_bytes],
      ["overhead", "tables and cut-off", accounts.table_bytes + accounts.fragmentation_bytes],
    ];
    const cached = ["cached", "idle prefixes", accounts.cached_bytes];
    let named;
    if (this.mode === "format") {
      const idle = held.cached ?? {};
      named = FORMATS.map((format) => [format, format, (accounts.used[format] ?? 0) - (idle[format] ?? 0)]);
      named.push(cached);
    } else if (this.mode === "state") {
      named = STATES.slice(0, 6).map((state) => [state, `${state}: ${MEANING[state]}`, sum(held[state])]);
    } else {
      const dark = this.colors().dark;
      const most = [...requests].sort((a, b) => sum(b.bytes) - sum(a.bytes)).slice(0, 12);
      named = most.map((row) => [{ color: ownerColor(row.key, dark) }, `#${row.key}`, sum(row.bytes)]);
      named.push(["shared", "of several", sum(held.shared)], cached);
    }
    return [...named, ...rest].filter(([, , amount]) => amount > 0);
  }

  cellAt(event) {
    if (!this.place) return null;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const { columns, span: width, height } = this.place;
    const column = Math.floor(x / (width + GAP));
    const index = Math.floor(y / (height + GAP)) * columns + column;
    const span = this.pool.map.spans[index];
    if (!span || column >= columns || column < 0) return null;
    const cell = Math.floor((x - column * (width + GAP)) / this.step(span));
    return cell >= 0 && cell < cellsOf(span) ? { span: index, cell } : null;
  }

  point(event) {
    if (this.pool) this.select(this.cellAt(event));
  }

  select(cursor) {
    if (cursor?.span === this.cursor?.span && cursor?.cell === this.cursor?.cell) return;
    this.cursor = cursor;
    this.draw();
    this.tell();
  }

  key(event) {
    const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (!move || !this.pool || !this.place) return;
    event.preventDefault();
    const spans = this.pool.map.spans;
    let { span, cell } = this.cursor ?? { span: 0, cell: -1 };
    span = Math.min(Math.max(span + move[1] * this.place.columns, 0), spans.length - 1);
    cell += move[0];
    if (cell >= cellsOf(spans[span]) && span + 1 < spans.length) [span, cell] = [span + 1, 0];
    if (cell < 0 && span > 0) [span, cell] = [span - 1, cellsOf(spans[span - 1]) - 1];
    this.select({ span, cell: Math.min(Math.max(cell, 0), cellsOf(spans[span]) - 1) });
  }

  tell() {
    const span = this.cursor && this.pool.map.spans[this.cursor.span];
    if (!span) return this.describe(null);
    const kind = this.pool.map.kinds[kindAt(span, this.cursor.cell)];
    if (!kind) return this.describe(null);
    const { pages_a_cell: pages, spans_a_cell: spans, span_bytes: spanBytes } = this.pool.map;
    const size = spans > 1 ? `${spans} spans, mostly` : span[0] === 0 ? `empty span of ${bytes(spanBytes)}` : pages > 1 ? `up to ${pages} pages of ${bytes(span[0])}, mostly` : `page of ${bytes(span[0])}`;
    const owner = kind.request === undefined ? "" : kind.request === "several" ? ", of several requests" : `, of request #${kind.request}`;
    const row = this.pool.requests.find((row) => row.key === kind.request);
    const tenant = row?.tenant && this.pool.tenants.length > 1 ? ` (${row.tenant})` : "";
    const format = kind.format ? `${kind.format}, ` : "";
    this.describe(`Span ${this.cursor.span * spans}, ${size}: ${format}${kind.state} (${MEANING[kind.state]})${owner}${tenant}.`);
  }
}

// Neighboring keys get hues far apart.
export function ownerColor(key, dark) {
  const hue = (key * 137.508 + 200) % 360;
  return `hsl(${hue.toFixed(0)} ${dark ? "60% 64%" : "58% 46%"})`;
}

function cellsOf(span) {
  let cells = 0;
  for (let index = 2; index < span.length; index += 2) cells += span[index];
  return cells;
}

function kindAt(span, cell) {
  let seen = 0;
  for (let index = 1; index < span.length; index += 2) {
    seen += span[index + 1];
    if (cell < seen) return span[index];
  }
  return undefined;
}
