// Puts the parts together, and hears the mouse and the keys.

const get = (id) => document.getElementById(id);
const trace = new Trace(JSON.parse(get("data").textContent));
const view = new View(trace.begin, trace.end);
const rows = new Rows(trace);
const search = new Search(trace);
const painter = new Painter(get("canvas"), get("overview"), trace);
const scroll = get("scroll");
let selected = -1;
let current = -1; // place of the selected match in search.list
let hover = null;
let pending = false;

function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(paintNow);
}

function paintNow() {
  pending = false;
  const height = scroll.clientHeight;
  get("canvas").style.height = `${height}px`;
  get("tall").style.height = `${Math.max(rows.height, height)}px`;
  painter.paint(view, rows, scroll.scrollTop, search, selected, hover);
  const hidden = painter.arrowsHidden ? `${painter.arrowsHidden} arrows: come closer to see them. ` : "";
  get("status").textContent = `${hidden}${measured || `${exact(view.begin)} to ${exact(view.end)}`}`;
}
let measured = "";

// -- selecting ---------------------------------------------------------------------------------------------------------

// A slice's number, or a step of trace.steps.
function select(what, move = false) {
  if (typeof what === "object") {
    if (what.frame >= 0) select(what.frame);
    view.fit(what.begin, what.end);
    redraw();
    return;
  }
  selected = what;
  panel.show(selected);
  if (selected >= 0 && move) reveal(selected);
  redraw();
}

function reveal(slice) {
  const [track] = trace.locate(slice);
  if (!rows.rowOf.has(track.index)) rows.fold(track.process, false);
  const [begin, end] = trace.span(slice);
  view.reveal(begin, end);
  // Come closer where it would be a hair.
  if ((end - begin) * view.scale < 3) view.fit(begin - (end - begin) * 20, end + (end - begin) * 20);
  const row = rows.rowOf.get(track.index);
  if (row.y - AXIS < scroll.scrollTop) scroll.scrollTop = row.y - AXIS - 24;
  else if (row.y + row.height > scroll.scrollTop + scroll.clientHeight) {
    get("tall").style.height = `${rows.height}px`;
    scroll.scrollTop = row.y + row.height - scroll.clientHeight + 8;
  }
}

function sliceAt(x, y) {
  const row = rows.at(y + scroll.scrollTop);
  if (!row || row.kind !== "slices" || x < GUTTER || y < AXIS) return -1;
  const { track } = row;
  const reach = 3 / view.scale; // short slices are hard to hit
  const at = view.time(x);
  let best = -1, nearest = Infinity;
  for (let i = track.after(at - reach); i < track.count && track.begin[i] <= at + reach; i++) {
    const distance = at < track.begin[i] ? track.begin[i] - at : Math.max(at - track.end[i], 0);
    if (distance < nearest) [best, nearest] = [track.first + i, distance];
    if (nearest === 0) break;
  }
  return best;
}

function step(direction) {
  if (selected < 0) return;
  const [track, i] = trace.locate(selected);
  if (i + direction >= 0 && i + direction < track.count) select(selected + direction, true);
}

function fitSelection() {
  if (selected < 0) return;
  const [begin, end] = trace.span(selected);
  const before = [view.begin, view.end];
  view.fit(begin, end);
  const unchanged = Math.abs(view.begin - before[0]) + Math.abs(view.end - before[1]) < view.span * 1e-6;
  const own = trace.steps[trace.stepOf[selected]];
  if (unchanged && own) view.fit(own.begin, own.end);
  redraw();
}

// -- searching ---------------------------------------------------------------------------------------------------------

function find(query) {
  search.run(query);
  current = -1;
  const found = get("found");
  found.textContent = search.active ? `${search.list.length} found` : "";
  found.classList.toggle("none", search.active && !search.list.length);
  redraw();
}

function go(direction) {
  if (!search.list.length) return;
  const length = search.list.length;
  if (current < 0) {
    // From what is seen on: the first match in the window, or behind it.
    const first = search.list.findIndex((slice) => trace.span(slice)[0] >= view.begin);
    current = direction > 0 ? Math.max(first, 0) : first < 0 ? length - 1 : (first - 1 + length) % length;
  } else {
    current = (current + direction + length) % length;
  }
  select(search.list[current], true);
  get("found").textContent = `${current + 1} of ${length}`;
}

let typing = 0;
get("query").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => find(get("query").value), 100);
});
get("search").addEventListener("submit", (event) => event.preventDefault());
get("query").addEventListener("keydown", (event) => {
  if (event.key === "Enter") {
    event.preventDefault();
    clearTimeout(typing);
    if (search.query !== get("query").value) find(get("query").value);
    go(event.shiftKey ? -1 : 1);
  } else if (event.key === "Escape") {
    get("query").value = "";
    find("");
    scroll.focus();
  }
  event.stopPropagation();
});
get("next").addEventListener("click", () => go(1));
get("previous").addEventListener("click", () => go(-1));

// -- mouse -------------------------------------------------------------------------------------------------------------

let drag = null;
const canvas = get("canvas");

function place(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  const [x, y] = place(event);
  canvas.setPointerCapture(event.pointerId);
  drag = { x, y, lastX: x, lastY: y, moved: false, axis: y < AXIS && x > GUTTER };
  get("tip").hidden = true;
});

canvas.addEventListener("pointermove", (event) => {
  const [x, y] = place(event);
  hover = { x };
  if (drag) {
    drag.moved ||= Math.abs(x - drag.x) + Math.abs(y - drag.y) > 3;
    if (drag.axis) {
      hover.from = drag.x;
      measured = `${short(Math.abs(view.time(x) - view.time(drag.x)))} from ${exact(view.time(Math.min(x, drag.x)))}`;
    } else if (drag.moved) {
      view.pan(drag.lastX - x);
      scroll.scrollTop += drag.lastY - y;
    }
    [drag.lastX, drag.lastY] = [x, y];
  } else {
    showTip(x, y);
  }
  redraw();
});

canvas.addEventListener("pointerup", (event) => {
  const [x, y] = place(event);
  if (!drag) return;
  const { axis, moved, x: from } = drag;
  drag = null;
  measured = "";
  if (axis && moved) view.show(view.time(Math.min(from, x)), view.time(Math.max(from, x)));
  else if (!moved) click(x, y);
  redraw();
});
canvas.addEventListener("pointercancel", () => { drag = null; measured = ""; redraw(); });
canvas.addEventListener("pointerleave", () => { hover = null; get("tip").hidden = true; redraw(); });

function click(x, y) {
  const row = rows.at(y + scroll.scrollTop);
  if (row && row.kind === "process" && y >= AXIS) {
    rows.fold(row.process.id);
    return;
  }
  panel.open("slice");
  select(sliceAt(x, y));
}

canvas.addEventListener("dblclick", (event) => {
  if (sliceAt(...place(event)) >= 0) fitSelection();
});

scroll.addEventListener("wheel", (event) => {
  const [x] = place(event);
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    view.zoom(Math.exp(Math.min(Math.max(event.deltaY, -200), 200) / 300), x);
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    view.pan(event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX);
  } else {
    return; // the browser scrolls
  }
  redraw();
}, { passive: false });
scroll.addEventListener("scroll", redraw);

function showTip(x, y) {
  const tip = get("tip");
  const slice = sliceAt(x, y);
  canvas.style.cursor = slice >= 0 ? "pointer" : y < AXIS && x > GUTTER ? "col-resize" : "default";
  tip.hidden = slice < 0;
  if (slice < 0) return;
  tip.replaceChildren(...panel.tip(slice));
  const room = get("scroll").getBoundingClientRect();
  tip.style.left = `${Math.max(Math.min(x + 14, room.width - tip.offsetWidth - 20), 0)}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > room.height ? Math.max(y - tip.offsetHeight - 8, 0) : y + 18}px`;
}

// The overview: a click or a drag moves the window there.
const overview = get("overview");
function moveTo(event) {
  const box = overview.getBoundingClientRect();
  const at = trace.begin + ((event.clientX - box.left) / box.width) * (trace.end - trace.begin);
  view.show(at - view.span / 2, at + view.span / 2);
  redraw();
}
overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); moveTo(event); });
overview.addEventListener("pointermove", (event) => { if (event.buttons & 1) moveTo(event); });

const divider = get("divider");
divider.addEventListener("pointerdown", (event) => divider.setPointerCapture(event.pointerId));
divider.addEventListener("pointermove", (event) => {
  if (!(event.buttons & 1)) return;
  const height = Math.min(Math.max(window.innerHeight - event.clientY - 3, 60), window.innerHeight - 200);
  get("panel").style.height = `${height}px`;
  redraw();
});

// -- keys and buttons --------------------------------------------------------------------------------------------------

const actions = {
  closer: () => view.zoom(0.7, hover && hover.x > GUTTER ? hover.x : undefined),
  away: () => view.zoom(1 / 0.7, hover && hover.x > GUTTER ? hover.x : undefined),
  earlier: () => view.pan(-0.15 * (view.width - GUTTER)),
  later: () => view.pan(0.15 * (view.width - GUTTER)),
  whole: () => view.all(),
  colours: () => {
    painter.byMicrobatch = !painter.byMicrobatch;
    painter.overviewImage = null;
    get("colours").textContent = painter.byMicrobatch ? "by microbatch" : "by stage";
    legend();
  },
  arrows: () => {
    painter.arrows = !painter.arrows;
    get("arrows").setAttribute("aria-pressed", String(painter.arrows));
  },
  theme: () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    themed();
  },
  help: () => get("keys").showModal(),
};
const KEYS = {
  w: actions.closer, "+": actions.closer, "=": actions.closer, s: actions.away, "-": actions.away,
  a: actions.earlier, d: actions.later, 0: actions.whole, Home: actions.whole, f: fitSelection,
  c: actions.colours, x: actions.arrows, t: actions.theme, "?": actions.help,
  ArrowLeft: () => step(-1), ArrowRight: () => step(1),
  ArrowUp: () => { scroll.scrollTop -= 48; }, ArrowDown: () => { scroll.scrollTop += 48; },
  Escape: () => select(-1), "/": () => get("query").focus(), n: () => go(1), N: () => go(-1),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || get("keys").open) return;
  if (event.target instanceof HTMLButtonElement && (event.key === "Enter" || event.key === " ")) return;
  // Where text can be scrolled with the arrows, they scroll it.
  if (event.target.closest?.(".tab") && event.key.startsWith("Arrow")) return;
  const action = KEYS[event.key] || KEYS[event.key.toLowerCase()];
  if (!action) return;
  event.preventDefault();
  action();
  redraw();
});

const BUTTONS = {
  "zoom-in": () => view.zoom(0.7), "zoom-out": () => view.zoom(1 / 0.7), fit: fitSelection, whole: actions.whole,
  colours: actions.colours, arrows: actions.arrows, theme: actions.theme, help: actions.help,
};
for (const [id, action] of Object.entries(BUTTONS)) get(id).addEventListener("click", () => { action(); redraw(); });

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function themed() {
  get("theme").textContent = isDark() ? "light" : "dark";
  painter.readColours();
  legend();
  redraw();
}

function legend() {
  const used = new Set(trace.tracks.flatMap((track) => [...new Set(painter.byMicrobatch ? track.microbatch : track.stage)]));
  const names = painter.byMicrobatch
    ? [...used].filter((n) => n >= 0).sort((a, b) => a - b).slice(0, 8).map((n) => [`microbatch ${n}`, painter.microbatchColours[n % 8]])
    : trace.stages.map((stage, n) => [stage, painter.stageColours[n], n]).filter((each) => used.has(each[2]));
  get("legend").replaceChildren(...names.map(([name, colour]) => {
    const box = element("i");
    box.style.background = colour;
    return element("span", {}, box, name);
  }));
}

const panel = new Panel(trace, select);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);
new ResizeObserver(redraw).observe(scroll);
panel.show(-1);
themed();
paintNow();

// For the browser's console, and for tests.
window.timeline = {
  trace, view, search, select, find, redraw,
  get selected() { return selected; },
  get arrows() { return painter.arrowsShown; },
  // Where a slice lies on the screen: [left, top, right, bottom]; null where it is folded away.
  box(slice) {
    const [track, i] = trace.locate(slice);
    const row = rows.rowOf.get(track.index);
    if (!row) return null;
    const at = canvas.getBoundingClientRect();
    const y = at.top + row.y - scroll.scrollTop;
    return [at.left + view.x(track.begin[i]), y, at.left + view.x(track.end[i]), y + row.height];
  },
  // The slices that a query finds, by their track and name.
  named(query) {
    const other = new Search(trace);
    other.run(query);
    return other.list.map((slice) => [slice, trace.locate(slice)[0].name, trace.name(slice)]);
  },
};
