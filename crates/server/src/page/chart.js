// A line over the last minutes, drawn on a canvas.

const SECONDS = 300;
// Values that are further apart are not joined.
const GAP_SECONDS = 20;

export class Chart {
  constructor(canvas, colorName) {
    this.canvas = canvas;
    this.colorName = colorName;
    this.points = []; // [seconds, value or null]
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  push(seconds, value) {
    this.points.push([seconds, value]);
    while (this.points.length && this.points[0][0] < seconds - SECONDS) this.points.shift();
    this.draw();
  }

  clear() {
    this.points = [];
    this.draw();
  }

  draw() {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const paper = canvas.getContext("2d");
    paper.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    paper.strokeStyle = style.getPropertyValue("--line");
    paper.beginPath();
    paper.moveTo(0, height - 0.5);
    paper.lineTo(width, height - 0.5);
    paper.stroke();
    const known = this.points.filter(([, value]) => value !== null);
    if (known.length < 2) return;
    const end = this.points.at(-1)[0];
    const most = Math.max(...known.map(([, value]) => value)) || 1;
    const x = (seconds) => width - ((end - seconds) / SECONDS) * width;
    const y = (value) => height - 1 - (value / most) * (height - 4);
    const color = style.getPropertyValue(this.colorName).trim();
    paper.lineWidth = 1.5;
    paper.lineJoin = "round";
    paper.strokeStyle = color;
    paper.fillStyle = color;
    for (const stretch of stretches(known)) {
      paper.beginPath();
      for (const [seconds, value] of stretch) paper.lineTo(x(seconds), y(value));
      paper.stroke();
      paper.lineTo(x(stretch.at(-1)[0]), height);
      paper.lineTo(x(stretch[0][0]), height);
      paper.globalAlpha = 0.12;
      paper.fill();
      paper.globalAlpha = 1;
    }
  }
}

function stretches(points) {
  const found = [];
  for (const point of points) {
    const before = found.at(-1)?.at(-1);
    if (before && point[0] - before[0] <= GAP_SECONDS) found.at(-1).push(point);
    else found.push([point]);
  }
  return found;
}
