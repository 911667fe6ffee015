// The page's data, unpacked: tracks with their slices in order of time, and what is known about each slice.
// A slice is a number, counted through all tracks from top to bottom.

class Track {
  constructor(packed, first, index) {
    this.index = index;
    this.process = packed.process;
    this.name = packed.name;
    this.first = first;
    this.count = packed.begin.length;
    this.begin = new Float64Array(this.count);
    this.end = new Float64Array(this.count);
    let at = 0;
    for (let i = 0; i < this.count; i++) {
      at += packed.begin[i];
      this.begin[i] = at;
      this.end[i] = at + packed.length[i];
    }
    this.text = Uint32Array.from(packed.text);
    this.stage = Uint8Array.from(packed.stage);
    this.wait = new Map();
    for (let i = 0; i < packed.wait.length; i += 2) this.wait.set(packed.wait[i], packed.wait[i + 1]);
    this.shapes = packed.shapes;
    this.shape = packed.shape || null;
    this.row = null;
    if (this.shape) {
      const rows = this.shapes.map(() => 0);
      this.row = Uint32Array.from(this.shape, (shape) => rows[shape]++);
    }
    this.microbatch = new Int16Array(this.count).fill(-1);
    this.each("microbatch", (i, value) => { this.microbatch[i] = value; });
    const known = new Set(this.microbatch);
    known.delete(-1);
    this.mixed = known.size > 1;
  }

  // Calls `then(i, value)` for every slice that has this detail.
  each(key, then) {
    this.shapes.forEach((shape, number) => {
      const place = shape.keys.indexOf(key);
      if (place < 0) return;
      for (let i = 0; i < this.count; i++) {
        if (!this.shape) then(i, cell(shape.columns[place], i));
        else if (this.shape[i] === number) then(i, cell(shape.columns[place], this.row[i]));
      }
    });
  }

  details(i) {
    const shape = this.shapes[this.shape ? this.shape[i] : 0];
    const row = this.row ? this.row[i] : i;
    return Object.fromEntries(shape.keys.map((key, place) => [key, cell(shape.columns[place], row)]));
  }

  // The first slice that ends after `time`. Slices of a track do not overlap, so their ends ascend too.
  after(time) {
    return lowerBound(this.end, time, true);
  }

  // The first slice that begins at `time` or later.
  from(time) {
    return lowerBound(this.begin, time, false);
  }
}

function cell(column, row) {
  if (Array.isArray(column)) return column[row];
  return "all" in column ? column.all : column.of[column.at[row]];
}

function lowerBound(values, wanted, behind) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted || (behind && values[middle] === wanted)) low = middle + 1;
    else high = middle;
  }
  return low;
}

class Counter {
  constructor(packed) {
    this.process = packed.process;
    this.name = packed.name;
    this.unit = packed.unit;
    let at = 0;
    const samples = packed.at.map((difference, i) => [(at += difference), packed.value[i]]);
    samples.sort((a, b) => a[0] - b[0]); // steps that were recorded twice go back in time
    this.at = Float64Array.from(samples, (sample) => sample[0]);
    this.value = Float64Array.from(samples, (sample) => sample[1]);
    this.highest = this.value.reduce((a, b) => Math.max(a, b), 0);
  }
}

class Trace {
  constructor(data) {
    this.title = data.title;
    this.facts = data.facts;
    this.strings = data.strings;
    this.stages = data.stages;
    this.processes = data.processes;
    this.process = new Map(data.processes.map((each) => [each.id, each]));
    this.tracks = [];
    this.slices = 0;
    for (const packed of data.tracks) {
      const track = new Track(packed, this.slices, this.tracks.length);
      this.tracks.push(track);
      this.slices += track.count;
    }
    this.firsts = Float64Array.from(this.tracks, (track) => track.first);
    this.counters = data.counters.map((packed) => new Counter(packed));
    this.arrows = data.arrows.map(([from, to, departs, travels, name, category]) =>
      ({ from, to, departs, arrives: departs + travels, name: this.strings[name], category: this.strings[category] }));
    this.begin = Infinity;
    this.end = -Infinity;
    for (const track of this.tracks) {
      if (!track.count) continue;
      this.begin = Math.min(this.begin, track.begin[0]);
      this.end = Math.max(this.end, track.end[track.count - 1]);
    }
    if (!(this.begin < this.end)) [this.begin, this.end] = [Math.min(this.begin, 0), Math.min(this.begin, 0) + 1000];
    this.broken = new Set(); // slices that failed, and windows whose receive never ran
    for (const track of this.tracks) {
      track.each("failed", (i, value) => { if (value) this.broken.add(track.first + i); });
      track.each("complete", (i, value) => { if (value === false) this.broken.add(track.first + i); });
      track.each("error", (i, value) => { if (value) this.broken.add(track.first + i); });
    }
    this.findSteps(data);
  }

  findSteps(data) {
    const byKey = new Map();
    this.steps = [];
    this.stepOf = new Int32Array(this.slices).fill(-1);
    for (const track of this.tracks) {
      const rank = this.process.get(track.process).rank;
      const runs = new Array(track.count).fill("");
      track.each("run", (i, value) => { runs[i] = value; });
      track.each("step", (i, value) => {
        const key = JSON.stringify([runs[i], value, rank]);
        let step = byKey.get(key);
        if (step === undefined) {
          step = { number: this.steps.length, run: runs[i], step: value, rank, begin: Infinity, end: -Infinity, frame: -1, text: "", operations: new Map() };
          byKey.set(key, step);
          this.steps.push(step);
        }
        this.stepOf[track.first + i] = step.number;
        step.begin = Math.min(step.begin, track.begin[i]);
        step.end = Math.max(step.end, track.end[i]);
        if (track.name.startsWith("steps")) step.frame = track.first + i;
      });
    }
    for (const words of data.steps) {
      const step = byKey.get(JSON.stringify([words.run, words.step, words.rank]));
      if (!step) continue;
      step.text = `${words.heading}\n${data.texts[words.body]}`;
      step.operations = new Map(words.operations.map(([microbatch, slice, lines]) =>
        [`${microbatch} ${slice}`, lines.map((n) => data.texts[n])]));
    }
    this.inOrder = [...this.steps].sort((a, b) => a.begin - b.begin || a.rank - b.rank);
  }

  // [track, index on it]
  locate(slice) {
    const track = this.tracks[lowerBound(this.firsts, slice, true) - 1];
    return [track, slice - track.first];
  }

  name(slice) {
    const [track, i] = this.locate(slice);
    return this.strings[track.text[i]];
  }

  span(slice) {
    const [track, i] = this.locate(slice);
    return [track.begin[i], track.end[i]];
  }

  // What the slice issued, where that was recorded.
  operationsOf(slice) {
    const [track, i] = this.locate(slice);
    const step = this.steps[this.stepOf[slice]];
    const { microbatch, slice: number } = track.details(i);
    return (step && step.operations.get(`${microbatch} ${number}`)) || [];
  }

  arrowsOf(slice) {
    return this.arrows.filter((arrow) => arrow.from === slice || arrow.to === slice);
  }
}
