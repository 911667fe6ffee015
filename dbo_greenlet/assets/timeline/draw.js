// Painting. What lies within one pixel is painted as one mark, so that the work depends on the screen and not on the
// trace.

const LABEL_FONT = '11px "DejaVu Sans Mono", ui-monospace, Menlo, Consolas, monospace';
const TEXT_FONT = '12px system-ui, "DejaVu Sans", sans-serif';
const MOST_ARROWS = 400;
const COLOURS = ["back", "panel", "row", "line", "strong", "weak", "accent", "match", "arrow", "ink"];

class Painter {
  constructor(canvas, overview, trace) {
    this.canvas = canvas;
    this.overview = overview;
    this.trace = trace;
    this.byMicrobatch = false;
    this.arrows = true;
    this.arrowsHidden = 0;
    this.overviewImage = null;
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colour = Object.fromEntries(COLOURS.map((name) => [name, read(name)]));
    this.stageColours = this.trace.stages.map(read);
    this.microbatchColours = Array.from({ length: 8 }, (_, n) => read(`m${n}`));
    this.overviewImage = null;
  }

  fit(canvas) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(canvas.clientWidth, 1), height = Math.max(canvas.clientHeight, 1);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return { context, width, height };
  }

  colourOf(track, i) {
    if (!this.byMicrobatch) return this.stageColours[track.stage[i]];
    const microbatch = track.microbatch[i];
    return microbatch < 0 ? this.stageColours[this.trace.stages.length - 1] : this.microbatchColours[microbatch % 8];
  }

  // Calls box(i, x0, x1) for slices that can be seen, mark(i, j, x) for those from i to j that share a pixel.
  visit(track, begin, end, x, time, box, mark) {
    let i = track.after(begin);
    while (i < track.count && track.begin[i] < end) {
      const x0 = x(track.begin[i]), x1 = x(track.end[i]);
      if (x1 - x0 >= 1.5) {
        box(i, x0, x1);
        i++;
        continue;
      }
      const pixel = Math.floor(x0) + 1;
      let j = Math.max(lowerBound(track.begin, time(pixel), false), i + 1);
      // The last one may be long, and is drawn as what it is.
      if (j - 1 > i && x(track.end[j - 1]) - x(track.begin[j - 1]) >= 1.5) j--;
      mark(i, j, Math.floor(x0));
      i = j;
    }
  }

  paint(view, rows, top, search, selected, hover) {
    const { context, width, height } = this.fit(this.canvas);
    view.width = width;
    context.fillStyle = this.colour.back;
    context.fillRect(0, 0, width, height);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, width, height - AXIS);
    context.clip();
    this.grid(context, view, height);
    for (const row of rows.list) {
      const y = row.y - top;
      if (y + row.height < AXIS || y > height) continue;
      if (row.kind === "slices") this.slices(context, view, row.track, y, row.height, search, selected);
      else if (row.kind === "counter") this.counter(context, view, row.counter, y, row.height);
      else this.process(context, width, row.process, y, row.height, rows.folded.has(row.process.id));
    }
    this.paintArrows(context, view, rows, top, height, selected);
    for (const row of rows.list) {
      const y = row.y - top;
      if (row.kind !== "process" && y + row.height >= AXIS && y <= height) this.gutter(context, row, y);
    }
    context.restore();
    this.axis(context, view, width);
    if (hover && hover.x > GUTTER) this.pointer(context, view, hover, height);
    this.paintOverview(view, search);
  }

  ticks(view) {
    const distance = tickDistance(view.span, (view.width - GUTTER) / 130);
    const ticks = [];
    for (let at = Math.ceil(view.begin / distance) * distance; at <= view.end; at += distance) ticks.push(at);
    return { distance, ticks };
  }

  grid(context, view, height) {
    context.fillStyle = this.colour.line;
    context.globalAlpha = 0.6;
    for (const at of this.ticks(view).ticks) context.fillRect(Math.round(view.x(at)), AXIS, 1, height);
    context.globalAlpha = 1;
  }

  axis(context, view, width) {
    context.fillStyle = this.colour.panel;
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = this.colour.line;
    context.fillRect(0, AXIS - 1, width, 1);
    context.font = LABEL_FONT;
    context.textBaseline = "middle";
    const { distance, ticks } = this.ticks(view);
    for (const at of ticks) {
      const x = Math.round(view.x(at));
      if (x < GUTTER) continue;
      context.fillStyle = this.colour.weak;
      context.fillRect(x, AXIS - 7, 1, 6);
      context.fillText(tickLabel(at, distance), x + 4, AXIS / 2 - 1);
    }
    context.fillStyle = this.colour.panel;
    context.fillRect(0, 0, GUTTER, AXIS - 1);
    context.fillStyle = this.colour.weak;
    context.fillText(`${short(view.span)} wide`, 8, AXIS / 2 - 1);
  }

  pointer(context, view, hover, height) {
    context.fillStyle = this.colour.accent;
    context.globalAlpha = 0.5;
    if (hover.from !== undefined) {
      const low = Math.min(hover.from, hover.x);
      context.globalAlpha = 0.2;
      context.fillRect(low, 0, Math.abs(hover.x - hover.from), height);
    } else {
      context.fillRect(Math.round(hover.x), 0, 1, height);
    }
    context.globalAlpha = 1;
  }

  process(context, width, process, y, height, folded) {
    context.fillStyle = this.colour.panel;
    context.fillRect(0, y, width, height);
    context.fillStyle = this.colour.line;
    context.fillRect(0, y + height - 1, width, 1);
    context.fillStyle = this.colour.strong;
    context.font = `600 ${TEXT_FONT}`;
    context.textBaseline = "middle";
    const name = `${folded ? "\u25B8" : "\u25BE"} ${process.name}`;
    context.fillText(name, 8, y + height / 2);
    const behind = 8 + context.measureText(name).width + 12;
    context.fillStyle = this.colour.weak;
    context.font = TEXT_FONT;
    context.fillText(process.labels.join(", "), Math.max(behind, GUTTER + 4), y + height / 2);
  }

  gutter(context, row, y) {
    context.fillStyle = this.colour.back;
    context.fillRect(0, y, GUTTER - 1, row.height);
    context.fillStyle = this.colour.line;
    context.fillRect(0, y + row.height - 1, GUTTER, 1);
    context.fillRect(GUTTER - 1, y, 1, row.height);
    context.fillStyle = this.colour.strong;
    context.font = TEXT_FONT;
    context.textBaseline = "middle";
    const name = row.kind === "slices" ? row.track.name : row.counter.name;
    context.fillText(name, 20, y + row.height / 2, GUTTER - 26);
  }

  slices(context, view, track, y, height, search, selected) {
    const top = y + 3, tall = height - 6;
    context.font = LABEL_FONT;
    context.textBaseline = "middle";
    const character = (this.character ||= context.measureText("0").width);
    const right = view.width;
    const x = (time) => view.x(time), time = (pixel) => view.time(pixel);
    const box = (i, x0, x1) => {
      const slice = track.first + i;
      const dim = search.active && !search.hit[slice];
      const left = Math.max(x0, GUTTER - 2), wide = Math.min(x1, right + 2) - left;
      const gap = x1 - x0 > 4 ? 1 : 0; // a hair between neighbours
      context.fillStyle = this.colourOf(track, i);
      context.globalAlpha = dim ? 0.22 : 1;
      const wait = track.wait.get(i) || 0;
      const from = wait ? Math.min(Math.max(x(track.begin[i] + wait), left), left + wide) : left;
      if (wait) {
        context.globalAlpha *= 0.3;
        context.fillRect(left, top + tall / 2 - 2, from - left, 4);
        context.globalAlpha = dim ? 0.22 : 1;
      }
      context.fillRect(from, top, Math.max(left + wide - from - gap, 0.5), tall);
      if (track.mixed && !this.byMicrobatch && track.microbatch[i] >= 0) {
        context.fillStyle = this.microbatchColours[track.microbatch[i] % 8];
        context.fillRect(from, top + tall, Math.max(left + wide - from - gap, 0.5), 2);
      }
      if (this.trace.broken.has(slice)) {
        context.strokeStyle = this.colour.strong;
        context.lineWidth = 2;
        context.setLineDash([4, 3]);
        context.strokeRect(left + 1, top + 1, Math.max(wide - 3, 1), tall - 2);
        context.setLineDash([]);
      }
      if (search.active && !dim) {
        context.strokeStyle = this.colour.match;
        context.lineWidth = 2;
        context.strokeRect(left + 0.5, top - 0.5, Math.max(wide - 1 - gap, 1), tall + 1);
      }
      this.label(context, this.strings(track, i), from, left + wide - gap - from, y + height / 2, character, dim);
      context.globalAlpha = 1;
    };
    const mark = (i, j, pixel) => {
      const hit = search.active && search.before[track.first + j] > search.before[track.first + i];
      context.globalAlpha = search.active && !hit ? 0.22 : 1;
      context.fillStyle = hit ? this.colour.match : this.colourOf(track, i);
      context.fillRect(pixel, hit ? top - 2 : top, hit ? 2 : 1, hit ? tall + 4 : tall);
      context.globalAlpha = 1;
    };
    this.visit(track, view.time(GUTTER), view.end, x, time, box, mark);
    if (selected >= track.first && selected < track.first + track.count) {
      const i = selected - track.first;
      const left = Math.max(x(track.begin[i]), GUTTER - 4), until = Math.min(x(track.end[i]), right + 4);
      if (until >= GUTTER - 2 && left <= right) {
        context.strokeStyle = this.colour.strong;
        context.lineWidth = 2;
        context.strokeRect(left - 1, top - 1, Math.max(until - left, 2) + 1, tall + 2);
      }
    }
  }

  strings(track, i) { return this.trace.strings[track.text[i]]; }

  // All of the name, what stands before its comma, a C++ name without its namespaces, as much as fits, or nothing.
  label(context, text, x, room, y, character, dim) {
    const fits = Math.floor((room - 6) / character);
    if (fits < 2) return;
    let shown = text;
    if (shown.length > fits) shown = text.split(",")[0];
    if (shown.length > fits) shown = shown.slice(shown.lastIndexOf("::") + 1).replace(/^:/, "");
    if (shown.length > fits) shown = fits >= 4 ? shown.slice(0, fits - 1) + "\u2026" : "";
    context.fillStyle = dim ? this.colour.strong : this.colour.ink;
    context.fillText(shown, x + 3, y + 0.5);
  }

  counter(context, view, counter, y, height) {
    const low = y + height - 4, tall = height - 10;
    const level = (value) => low - (counter.highest ? (value / counter.highest) * tall : 0);
    context.fillStyle = this.colour.accent;
    context.globalAlpha = 0.35;
    let i = Math.max(lowerBound(counter.at, view.time(GUTTER), true) - 1, 0);
    while (i < counter.at.length && counter.at[i] < view.end) {
      const x0 = Math.max(view.x(counter.at[i]), GUTTER);
      const until = i + 1 < counter.at.length ? counter.at[i + 1] : counter.at[i];
      const x1 = Math.min(view.x(until), view.width);
      if (x1 - x0 >= 1) {
        context.fillRect(x0, level(counter.value[i]), x1 - x0, low - level(counter.value[i]));
        i++;
        continue;
      }
      // The highest of what shares the pixel.
      const j = Math.max(lowerBound(counter.at, view.time(Math.floor(x0) + 1), false), i + 1);
      let highest = 0;
      for (let n = i; n < j; n++) highest = Math.max(highest, counter.value[n]);
      context.fillRect(Math.floor(x0), level(highest), 1, low - level(highest));
      i = j;
    }
    context.globalAlpha = 1;
    context.font = LABEL_FONT;
    context.textBaseline = "top";
    context.fillStyle = this.colour.weak;
    context.fillText(`up to ${counter.highest} ${counter.unit}`, GUTTER + 4, y + 2);
    context.fillStyle = this.colour.line;
    context.fillRect(GUTTER, low, view.width, 1);
  }

  paintArrows(context, view, rows, top, height, selected) {
    this.arrowsHidden = 0;
    this.arrowsShown = 0;
    const shown = [];
    for (const arrow of this.trace.arrows) {
      const mine = arrow.from === selected || arrow.to === selected;
      // Every kernel has a launch: those are shown of the selected slice only.
      if (!mine && (!this.arrows || arrow.category === "launch")) continue;
      if (arrow.arrives < view.begin || arrow.departs > view.end) continue;
      if (!mine && (arrow.arrives - arrow.departs) * view.scale < 5) continue;
      const from = rows.rowOf.get(this.trace.locate(arrow.from)[0].index);
      const to = rows.rowOf.get(this.trace.locate(arrow.to)[0].index);
      if (!from || !to) continue;
      shown.push([arrow, from.y + from.height / 2 - top, to.y + to.height / 2 - top, mine]);
    }
    const many = shown.length > MOST_ARROWS;
    for (const [arrow, y0, y1, mine] of shown) {
      if (many && !mine) {
        this.arrowsHidden++;
        continue;
      }
      this.arrowsShown++;
      const x0 = view.x(arrow.departs), x1 = view.x(arrow.arrives), bend = Math.min((x1 - x0) / 2, 60);
      context.strokeStyle = context.fillStyle = this.colour.arrow;
      context.globalAlpha = mine ? 1 : 0.55;
      context.lineWidth = mine ? 2.5 : 1.2;
      context.beginPath();
      context.moveTo(x0, y0);
      context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
      context.stroke();
      context.beginPath();
      context.moveTo(x1 + 1, y1);
      context.lineTo(x1 - 6, y1 - 3.5);
      context.lineTo(x1 - 6, y1 + 3.5);
      context.fill();
      context.globalAlpha = 1;
    }
  }

  paintOverview(view, search) {
    const { context, width, height } = this.fit(this.overview);
    const ratio = window.devicePixelRatio || 1;
    const { begin, end } = this.trace;
    const scale = width / (end - begin);
    if (!this.overviewImage || this.overviewImage.width !== this.overview.width) {
      const image = document.createElement("canvas");
      image.width = this.overview.width;
      image.height = this.overview.height;
      const paint = image.getContext("2d");
      paint.setTransform(ratio, 0, 0, ratio, 0, 0);
      const tall = (height - 4) / Math.max(this.trace.tracks.length, 1);
      this.trace.tracks.forEach((track, n) => {
        const y = 2 + n * tall;
        const fill = (i, x0, x1) => {
          paint.fillStyle = this.colourOf(track, i);
          paint.fillRect(x0, y, Math.max(x1 - x0, 1), Math.max(tall - 0.5, 0.5));
        };
        const x = (time) => (time - begin) * scale, time = (pixel) => begin + pixel / scale;
        this.visit(track, begin - 1, end + 1, x, time, fill, (i, j, pixel) => fill(i, pixel, pixel + 1));
      });
      this.overviewImage = image;
    }
    context.fillStyle = this.colour.back;
    context.fillRect(0, 0, width, height);
    context.globalAlpha = 0.75;
    context.drawImage(this.overviewImage, 0, 0, width, height);
    context.globalAlpha = 1;
    if (search.active) {
      context.fillStyle = this.colour.match;
      let latest = -1;
      for (const slice of search.list) {
        const x = Math.floor((this.trace.span(slice)[0] - begin) * scale);
        if (x !== latest) context.fillRect((latest = x), 0, 2, 5);
      }
    }
    const left = Math.max((view.begin - begin) * scale, 0), right = Math.min((view.end - begin) * scale, width);
    context.fillStyle = this.colour.back;
    context.globalAlpha = 0.6;
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = this.colour.accent;
    context.lineWidth = 1.5;
    context.strokeRect(left + 1, 1, Math.max(right - left - 2, 2), height - 2);
  }
}
