// The stretch of time that is shown, and where it lies on the canvas.

const GUTTER = 168; // pixels for the names of the tracks
const SHORTEST = 50; // nanoseconds: deeper than that there is nothing to see

class View {
  constructor(begin, end) {
    this.whole = [begin, end];
    this.begin = begin;
    this.end = end;
    this.width = 1000; // of the canvas
    this.all();
  }

  get span() { return this.end - this.begin; }
  get scale() { return (this.width - GUTTER) / this.span; }

  x(time) { return GUTTER + (time - this.begin) * this.scale; }
  time(x) { return this.begin + (x - GUTTER) / this.scale; }

  all() {
    const margin = (this.whole[1] - this.whole[0]) * 0.01;
    this.show(this.whole[0] - margin, this.whole[1] + margin);
  }

  // The window is moved rather than made smaller where it would leave the trace.
  show(begin, end) {
    const [first, last] = this.whole;
    const most = (last - first) * 1.1;
    const span = Math.min(Math.max(end - begin, SHORTEST), Math.max(most, SHORTEST));
    const middle = (begin + end) / 2;
    const slack = Math.max(most - (last - first), span) / 2;
    const low = first - slack, high = last + slack - span;
    this.begin = Math.min(Math.max(middle - span / 2, Math.min(low, high)), Math.max(low, high));
    this.end = this.begin + span;
  }

  // `factor` < 1 comes closer; the time at pixel `x` stays where it is.
  zoom(factor, x = (GUTTER + this.width) / 2) {
    const at = this.time(Math.min(Math.max(x, GUTTER), this.width));
    const span = Math.max(this.span * factor, SHORTEST);
    const part = (at - this.begin) / this.span;
    this.show(at - part * span, at + (1 - part) * span);
  }

  pan(pixels) {
    const time = pixels / this.scale;
    this.show(this.begin + time, this.end + time);
  }

  // Zooms to a stretch, with room on both sides.
  fit(begin, end) {
    const margin = Math.max((end - begin) * 0.1, SHORTEST / 4);
    this.show(begin - margin, end + margin);
  }

  // Moves, without a change of scale, so that the stretch can be seen. What is longer than the window is begun.
  reveal(begin, end) {
    if (begin >= this.begin && end <= this.end) return;
    const middle = end - begin > this.span ? begin + this.span / 2 : (begin + end) / 2;
    this.show(middle - this.span / 2, middle + this.span / 2);
  }
}
