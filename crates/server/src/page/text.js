// Numbers as people read them, and elements from text: nothing here ever parses markup.

const COUNT = new Intl.NumberFormat("en-US");

export function count(number) {
  return COUNT.format(Math.round(number));
}

export function bytes(amount) {
  if (amount < 1024) return `${amount} B`;
  if (amount < 1024 ** 2) return `${(amount / 1024).toFixed(0)} KiB`;
  if (amount < 1024 ** 3) return `${(amount / 1024 ** 2).toFixed(1)} MiB`;
  return `${(amount / 1024 ** 3).toFixed(2)} GiB`;
}

// Three digits that matter.
export function short(number) {
  if (!Number.isFinite(number)) return "–";
  if (number >= 100) return count(number);
  return number.toFixed(number >= 10 ? 1 : 2);
}

export function ago(ms) {
  if (ms < 1000) return "now";
  if (ms < 60_000) return `${Math.floor(ms / 1000)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min`;
  return `${Math.floor(ms / 3_600_000)} h`;
}

export function sum(numbers) {
  return Object.values(numbers ?? {}).reduce((total, number) => total + number, 0);
}

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// Most precise first.
export const FORMATS = ["f16", "int8", "fp8-e4m3", "fp8-e5m2", "k8v4", "int4"];

// Parts of a whole, as a bar: `[amount, class, title]`.
export function bar(element, parts) {
  const shown = parts.filter(([amount]) => amount > 0);
  element.replaceChildren(...shown.map(([amount, className, title]) => {
    const part = make("span", className);
    part.style.flexGrow = amount;
    part.title = title;
    return part;
  }));
  element.setAttribute("aria-label", shown.map(([, , title]) => title).join(", "));
}
