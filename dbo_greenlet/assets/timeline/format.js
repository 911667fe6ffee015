// Times and values as people read them. Times are nanoseconds everywhere in this page.

const UNITS = [["ns", 1], ["us", 1e3], ["ms", 1e6], ["s", 1e9]];

function unitOf(ns) {
  const size = Math.abs(ns);
  return size < 1e3 ? UNITS[0] : size < 1e6 ? UNITS[1] : size < 1e9 ? UNITS[2] : UNITS[3];
}

// As short as four digits allow: "34.7 us".
function short(ns) {
  const [name, one] = unitOf(ns);
  const value = ns / one;
  const digits = Math.abs(value) >= 1000 || one === 1 ? 0 : Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 10 ? 2 : 3;
  return `${+value.toFixed(digits)} ${name}`;
}

// To the nanosecond, in microseconds as the trace has it: "141,444.965 us".
function exact(ns) {
  const negative = ns < 0 ? "-" : "";
  const whole = Math.abs(Math.round(ns));
  const digits = String(Math.floor(whole / 1000)).replace(/\B(?=(\d{3})+$)/g, ",");
  const rest = whole % 1000;
  return `${negative}${digits}${rest ? "." + String(rest).padStart(3, "0") : ""} us`;
}

// Round distances between the ticks of the axis: about `count` of them in `span`.
function tickDistance(span, count) {
  const least = span / Math.max(count, 1);
  const ten = 10 ** Math.floor(Math.log10(least));
  for (const factor of [1, 2, 5]) {
    if (ten * factor >= least) return Math.max(ten * factor, 1);
  }
  return Math.max(ten * 10, 1);
}

// A tick's label needs as many digits as tell it from its neighbours.
function tickLabel(ns, distance) {
  const [name, one] = distance < 1e3 ? UNITS[1] : distance < 1e6 ? UNITS[1] : distance < 1e9 ? UNITS[2] : UNITS[3];
  const digits = Math.max(0, Math.ceil(Math.log10(one / distance)));
  const [whole, part] = (ns / one).toFixed(digits).split(".");
  return `${whole.replace(/\B(?=(\d{3})+$)/g, ",")}${part ? "." + part : ""} ${name}`;
}

function valueText(value) {
  if (typeof value === "string") return value;
  return JSON.stringify(value);
}

// "50us", "1.5 ms", "200" (microseconds) -> nanoseconds; NaN for anything else.
function parseDuration(text) {
  const match = /^(\d+(?:\.\d*)?|\.\d+)\s*(ns|us|µs|ms|s)?$/.exec(text.trim());
  if (!match) return NaN;
  return Number(match[1]) * { ns: 1, us: 1e3, "µs": 1e3, ms: 1e6, s: 1e9 }[match[2] || "us"];
}
