// The panel below the timeline, and the tip at the pointer. Text goes in as text, never as markup.

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function tableOf(rows) {
  const body = element("tbody");
  for (const [name, value] of rows) {
    body.append(element("tr", {}, element("td", { textContent: name }),
      element("td", {}, value instanceof Node ? value : valueText(value))));
  }
  return element("table", {}, body);
}

class Panel {
  constructor(trace, select) {
    this.trace = trace;
    this.select = select;
    this.details = document.getElementById("details");
    this.timetable = document.getElementById("timetable");
    this.steps = document.getElementById("tab-steps");
    this.stepRows = [];
    for (const tab of document.querySelectorAll("[data-tab]")) {
      tab.addEventListener("click", () => this.open(tab.dataset.tab));
    }
    this.about();
    this.listSteps();
  }

  open(name) {
    for (const tab of document.querySelectorAll("[data-tab]")) {
      const mine = tab.dataset.tab === name;
      tab.setAttribute("aria-selected", String(mine));
      document.getElementById(`tab-${tab.dataset.tab}`).hidden = !mine;
    }
  }

  // All that is recorded of a slice: [name, value] pairs.
  facts(slice) {
    const { trace } = this;
    const [track, i] = trace.locate(slice);
    const process = trace.process.get(track.process);
    const begin = track.begin[i], end = track.end[i];
    const rows = [["track", `${process.name}, ${track.name}`], ["begin", exact(begin)], ["end", exact(end)],
      ["length", end - begin < 1000 ? short(end - begin) : `${exact(end - begin)}${end - begin >= 1e6 ? ` (${short(end - begin)})` : ""}`]];
    const step = trace.steps[trace.stepOf[slice]];
    if (step && step.frame >= 0 && step.frame !== slice) {
      rows.push(["in its step", `${exact(begin - trace.span(step.frame)[0])} after its begin`]);
    }
    if (track.wait.has(i)) {
      const wait = track.wait.get(i);
      rows.push(["waits", `${exact(wait)} of it, for the other stream`]);
    }
    if (track.stage[i] < trace.stages.length - 1) rows.push(["stage", trace.stages[track.stage[i]]]);
    for (const [key, value] of Object.entries(track.details(i))) {
      if (value === null || value === "") continue;
      if (key !== "stage") rows.push([key, value]);
    }
    for (const arrow of trace.arrowsOf(slice)) {
      const other = arrow.from === slice ? arrow.to : arrow.from;
      const [otherTrack] = trace.locate(other);
      const link = element("button", { type: "button", className: "link", textContent:
        `${arrow.name}: ${trace.name(other)} on ${otherTrack.name}, ${short(arrow.arrives - arrow.departs)} ${arrow.from === slice ? "later" : "before"}` });
      link.addEventListener("click", () => this.select(other, true));
      rows.push([arrow.from === slice ? "goes to" : "comes from", link]);
    }
    const operations = trace.operationsOf(slice);
    if (operations.length) rows.push(["operations", operations.join("\n")]);
    return rows;
  }

  show(slice) {
    this.details.replaceChildren();
    if (slice < 0) {
      this.details.append(element("p", { className: "hint", textContent:
        "Click on a slice to see all that is recorded of it. Ctrl + wheel or W and S zoom, dragging moves, / searches, ? lists the keys." }));
      const first = this.trace.inOrder.find((step) => step.text) || { text: "" };
      this.timetable.textContent = first.text;
      this.mark(null);
      return;
    }
    this.details.append(element("h2", { textContent: this.trace.name(slice) }), tableOf(this.facts(slice)));
    const step = this.trace.steps[this.trace.stepOf[slice]];
    this.timetable.textContent = step ? step.text || "No timetable: the page was made without the text of this step." : "";
    this.mark(step || null);
  }

  mark(step) {
    for (const [number, row] of this.stepRows) row.classList.toggle("chosen", step !== null && number === step.number);
  }

  tip(slice) {
    const [track, i] = this.trace.locate(slice);
    const details = track.details(i);
    const lines = [`${short(track.end[i] - track.begin[i])}, ${track.name}`];
    const where = ["step", "layer", "microbatch", "slice"].filter((key) => typeof details[key] === "number");
    if (where.length) lines.push(where.map((key) => `${key} ${details[key]}`).join(", "));
    if (details.site) lines.push(`to ${details.site}`);
    if (track.wait.has(i)) lines.push(`waits ${short(track.wait.get(i))} of it`);
    return [element("b", { textContent: this.trace.name(slice) }), `\n${lines.join("\n")}`];
  }

  about() {
    const { trace } = this;
    const rows = [...trace.facts, ["slices", trace.slices], ["arrows", trace.arrows.length], ["steps", trace.steps.length],
      ["length", short(trace.end - trace.begin)]];
    document.getElementById("tab-about").append(tableOf(rows));
  }

  listSteps() {
    const { trace } = this;
    if (!trace.steps.length) {
      this.steps.append(element("p", { className: "hint", textContent: "There are no steps in this trace." }));
      return;
    }
    const most = 5000; // rows that a browser lays out without a pause
    const head = ["step", "rank", "run", "tokens", "begin", "length", "why", "execution"];
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { textContent: text })))));
    const body = element("tbody");
    for (const step of trace.inOrder.slice(0, most)) {
      const details = step.frame < 0 ? {} : ((found) => found[0].details(found[1]))(trace.locate(step.frame));
      const link = element("button", { type: "button", className: "link", textContent: String(step.step) });
      link.addEventListener("click", () => this.select(step, true));
      const texts = [String(step.rank), step.run, details.tokens === undefined ? "" : String(details.tokens), exact(step.begin),
        short(step.end - step.begin), details.reason || "", details.error || details.execution || ""];
      const row = element("tr", {}, element("td", { className: "number" }, link),
        ...texts.map((text, n) => element("td", { textContent: text, className: [0, 2, 3, 4].includes(n) ? "number" : "" })));
      this.stepRows.push([step.number, row]);
      body.append(row);
    }
    table.append(body);
    this.steps.append(table);
    if (trace.steps.length > most) {
      this.steps.append(element("p", { className: "hint", textContent: `and ${trace.steps.length - most} more; search for step:N` }));
    }
  }
}
