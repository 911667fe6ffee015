// Which track is drawn at which height. Ranks can be folded.

const AXIS = 24;
const HEIGHTS = { process: 24, slices: 24, counter: 38 };

class Rows {
  constructor(trace) {
    this.trace = trace;
    this.folded = new Set();
    this.layout();
  }

  layout() {
    this.list = [];
    this.rowOf = new Map(); // track's index -> its row
    let y = AXIS;
    const add = (row) => {
      row.y = y;
      row.height = HEIGHTS[row.kind];
      this.list.push(row);
      y += row.height;
    };
    for (const process of this.trace.processes) {
      add({ kind: "process", process });
      if (this.folded.has(process.id)) continue;
      for (const track of this.trace.tracks) {
        if (track.process !== process.id) continue;
        const row = { kind: "slices", process, track };
        add(row);
        this.rowOf.set(track.index, row);
      }
      for (const counter of this.trace.counters) {
        if (counter.process === process.id) add({ kind: "counter", process, counter });
      }
    }
    this.height = y + 8;
  }

  fold(process, folded = !this.folded.has(process)) {
    if (folded) this.folded.add(process);
    else this.folded.delete(process);
    this.layout();
  }

  at(y) {
    return this.list.find((row) => y >= row.y && y < row.y + row.height) || null;
  }
}
