// What is typed into the search box -> which slices match.

const NUMBERS = new Set(["layer", "microbatch", "rank", "step", "slice"]);
const SAME = { mb: "microbatch", ubatch: "microbatch", layers: "layer", steps: "step", ranks: "rank" };

// "layer 3 combine" -> [{key: "layer", text: "3"}, {key: "", text: "combine"}]
function parseQuery(query) {
  const words = query.match(/\w+:"[^"]*"?|"[^"]*"?|\S+/g) || [];
  const terms = [];
  for (let n = 0; n < words.length; n++) {
    const word = words[n];
    const colon = /^([a-z]\w*):(.*)$/i.exec(word);
    const bare = (SAME[word.toLowerCase()] || word.toLowerCase());
    if (colon) {
      const key = colon[1].toLowerCase();
      terms.push({ key: SAME[key] || key, text: unquoted(colon[2]).toLowerCase() });
    } else if (NUMBERS.has(bare) && /^\d+(-\d+)?$/.test(words[n + 1] || "")) {
      terms.push({ key: bare, text: words[++n] });
    } else {
      terms.push({ key: "", text: unquoted(word).toLowerCase() });
    }
  }
  return terms.filter((term) => term.text !== "");
}

function unquoted(text) {
  return text.startsWith('"') ? text.slice(1, text.endsWith('"') && text.length > 1 ? -1 : undefined) : text;
}

// A test for values of a detail: a number or a range of numbers exactly, anything else as part of the text.
function valueTest(text) {
  const range = /^(-?\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?$/.exec(text);
  if (range) {
    const low = Number(range[1]), high = Number(range[2] === undefined ? range[1] : range[2]);
    return (value) => typeof value === "number" ? value >= low && value <= high : valueText(value).toLowerCase().includes(text);
  }
  return (value) => valueText(value).toLowerCase().includes(text);
}

class Search {
  constructor(trace) {
    this.trace = trace;
    this.hit = new Uint8Array(trace.slices);
    this.before = new Uint32Array(trace.slices + 1); // matches among the slices with a lower number
    this.list = []; // in order of time
    this.query = "";
    this.active = false;
  }

  run(query) {
    const terms = parseQuery(query);
    this.query = query;
    this.active = terms.length > 0;
    this.hit.fill(0);
    this.list = [];
    if (this.active) {
      for (const track of this.trace.tracks) this.runTrack(track, terms);
    }
    const begins = new Float64Array(this.trace.slices);
    for (const track of this.trace.tracks) begins.set(track.begin, track.first);
    for (let slice = 0; slice < this.trace.slices; slice++) {
      this.before[slice + 1] = this.before[slice] + this.hit[slice];
      if (this.hit[slice]) this.list.push(slice);
    }
    this.list.sort((a, b) => begins[a] - begins[b] || a - b);
  }

  runTrack(track, terms) {
    const count = new Uint8Array(track.count); // of the terms that match
    for (const term of terms) {
      const matched = new Uint8Array(track.count);
      this.runTerm(track, term, matched);
      for (let i = 0; i < track.count; i++) count[i] += matched[i];
    }
    for (let i = 0; i < track.count; i++) this.hit[track.first + i] = count[i] === terms.length ? 1 : 0;
  }

  runTerm(track, { key, text }, matched) {
    const process = this.trace.process.get(track.process);
    if (key === "longer" || key === "shorter") {
      const limit = parseDuration(text);
      for (let i = 0; i < track.count; i++) {
        const length = track.end[i] - track.begin[i];
        matched[i] = key === "longer" ? length >= limit : length <= limit;
      }
      return;
    }
    if (key === "rank") {
      if (valueTest(text)(process.rank)) matched.fill(1);
      return;
    }
    if (key === "track") {
      if (track.name.toLowerCase().includes(text)) matched.fill(1);
      return;
    }
    if (key === "stage" || key === "name" || key === "") this.byWords(track, key, text, matched);
    if (key === "stage") return;
    if (key === "") {
      for (const site of ["site", "after"]) markText(track, site, text, matched);
      return;
    }
    if (key === "name") return;
    const test = valueTest(text);
    const keys = new Set(track.shapes.flatMap((shape) => shape.keys).filter((each) => asWord(each) === key));
    for (const each of keys) track.each(each, (i, value) => { if (test(value)) matched[i] = 1; });
  }

  // By what is written on the slice, and for bare words also by the name of its track and by its stage.
  byWords(track, key, text, matched) {
    const names = key === "stage" ? [] : this.trace.strings;
    const named = new Set(names.flatMap((name, n) => name.toLowerCase().includes(text) ? [n] : []));
    const staged = new Set(key === "name" ? [] : this.trace.stages.flatMap((stage, n) => stage.includes(text) ? [n] : []));
    const tracked = key === "" && track.name.toLowerCase().includes(text);
    for (let i = 0; i < track.count; i++) {
      if (tracked || named.has(track.text[i]) || staged.has(track.stage[i])) matched[i] = 1;
    }
  }
}

// A detail's name as it is typed: "received by" is received_by.
function asWord(key) {
  return key.toLowerCase().replace(/\W+/g, "_").replace(/^_|_$/g, "");
}

function markText(track, key, text, matched) {
  const known = new Map(); // few sites, many slices
  track.each(key, (i, value) => {
    if (typeof value !== "string") return;
    let found = known.get(value);
    if (found === undefined) known.set(value, (found = value.toLowerCase().includes(text)));
    if (found) matched[i] = 1;
  });
}
