// Kernel of a Node context: runs inside the sandbox, with nothing but Node 16 or newer.
//
// Requests are lines of JSON on descriptor 7, answers are frames (see `frames.py`) on descriptor 6.
// Descriptors 1 and 2 are pipes, read here from 8 and 9. The main thread runs the cells; a worker
// reads requests, passes on what subprocesses write, and interrupts the main thread by the inspector.
'use strict';

const shared = `
const fs = require('fs');
const OUTPUT_BYTES = 8 << 20;  // of one cell; the rest is counted
const FRAME_BYTES = 1 << 16;
const WIRE = 6, PIPES = [[8, 'out'], [9, 'err']];

class Wire {
  constructor(memory, holder) {
    this.lock = new Int32Array(memory, 0, 2);
    this.holder = holder;
    this.counts = new Float64Array(memory, 8, 2);  // bytes kept and dropped, of the cell that runs
    this.cellBytes = new Uint8Array(memory, 24, 64);
    this.buffer = Buffer.alloc(FRAME_BYTES);
    this.pipes = PIPES.map(([fd, kind]) =>
      [fs.openSync('/proc/self/fd/' + fd, fs.constants.O_RDONLY | fs.constants.O_NONBLOCK), kind]);
  }
  get cell() { return Buffer.from(this.cellBytes).toString('latin1').replace(/\\0+$/, ''); }
  set cell(id) { this.cellBytes.fill(0); this.cellBytes.set(Buffer.from(id, 'latin1')); }
  exclusively(work) {
    for (let held; (held = Atomics.compareExchange(this.lock, 0, 0, this.holder)) !== 0;) {
      if (held === this.holder) break;  // an interrupt has ended what held it: without \`finally\`
      Atomics.wait(this.lock, 0, held, 100);
    }
    try { return work(); } finally { Atomics.store(this.lock, 0, 0); Atomics.notify(this.lock, 0, 1); }
  }
  frame(kind, payload = Buffer.alloc(0), name = '-', cell = this.cell) {
    const shown = name.replace(/[^!-~]/g, '?').slice(0, 100) || '-';
    return Buffer.concat([Buffer.from('\\x1e' + [kind, cell || '-', payload.length, shown].join(' ') + '\\n', 'latin1'), payload]);
  }
  write(...frames) {
    let left = Buffer.concat(frames);
    while (left.length) {
      try { left = left.subarray(fs.writeSync(WIRE, left)); } catch (error) {
        if (error.code !== 'EAGAIN') process.reallyExit(1);
        Atomics.wait(this.lock, 1, 0, 1);
      }
    }
  }
  keep(kind, data) {
    const room = Math.max(0, OUTPUT_BYTES - this.counts[0]);
    this.counts[1] += Math.max(0, data.length - room);
    data = data.subarray(0, room);
    this.counts[0] += data.length;
    for (; data.length; data = data.subarray(FRAME_BYTES)) this.write(this.frame(kind, data.subarray(0, FRAME_BYTES)));
  }
  drain() {  // what comes between cells stays in the pipes for the next one
    let came = false;
    if (!this.cell) return came;
    for (const [fd, kind] of this.pipes) {
      for (let turn = 0; turn < 32; turn++) {  // a writer that never stops must not keep the lock
        let count = 0;
        try { count = fs.readSync(fd, this.buffer, 0, FRAME_BYTES, null); } catch {}
        if (!count) break;
        came = true;
        this.keep(kind, this.buffer.subarray(0, count));
      }
    }
    return came;
  }
}
`;

const listener = `
const { parentPort, workerData, MessagePort } = require('worker_threads');
const net = require('net');
const inspector = require('inspector');
const wire = new Wire(workerData.memory, 1), answers = workerData.answers;
const session = new inspector.Session();
session.connectToMainThread();
let queue = [], current = null, count = 0, pause = 4, timer = null, seen = Buffer.alloc(0);

function next() {
  if (current || !queue.length) return;
  current = queue.shift();
  if (current.do === 'run') count += 1;
  parentPort.postMessage({ ...current, count });
  poll(true);
}
function poll(isNew) {
  clearTimeout(timer);
  const came = wire.exclusively(() => wire.drain());
  pause = came || isNew ? 4 : Math.min(pause * 2, 32);
  if (came) return void (timer = setTimeout(poll, 0));
  if (current) timer = setTimeout(poll, pause);
}
function interruptChildren() {  // not all kernels list a process's children
  // /proc may be that of a PID namespace above ours, with other numbers.
  const own = fs.readlinkSync('/proc/self'), parents = new Map(), reached = new Set([own]);
  for (const pid of fs.readdirSync('/proc').filter(each => /^[0-9]+$/.test(each))) {
    try { parents.set(pid, fs.readFileSync('/proc/' + pid + '/stat', 'latin1').split(') ').pop().split(' ')[1]); } catch {}
  }
  for (let before = 0; before < reached.size;) {
    before = reached.size;
    for (const [pid, parent] of parents) if (reached.has(parent)) reached.add(pid);
  }
  reached.delete(own);
  for (const pid of reached) try {
    const ids = /^NSpid:.*[^0-9]([0-9]+)$/m.exec(fs.readFileSync('/proc/' + pid + '/status', 'latin1'));
    process.kill(Number(ids ? ids[1] : pid), 'SIGINT');
  } catch {}
}
function interrupt(cell) {
  const at = queue.findIndex(each => each.cell === cell);
  if (at >= 0) {
    const [skipped] = queue.splice(at, 1);
    const part = (name, text) => wire.frame('part', Buffer.from(text), name, skipped.cell);
    wire.exclusively(() => wire.write(
      part('name', 'KeyboardInterrupt'), part('value', 'the cell was interrupted before its turn'),
      wire.frame('error', undefined, '-', skipped.cell), wire.frame('done', Buffer.from(count + ' 0'), '-', skipped.cell)));
  } else if (current && (cell === null || cell === current.cell)) {
    stop(current.cell);
    interruptChildren();
  }
}
function stop(cell) {  // again and again: the main thread may not have begun, or V8 still end something else
  if (!current || current.cell !== cell) return;
  session.post('Runtime.evaluate', {
    expression: 'globalThis[Symbol.for("ringfence.interrupt")](' + JSON.stringify(cell) + ')', silent: true });
  setTimeout(stop, 50, cell);
}
function take(request) {
  if (request.do === 'answer') {
    answers.postMessage(request.text);
    Atomics.add(wire.lock, 1, 1);
    Atomics.notify(wire.lock, 1);
  } else if (request.do === 'interrupt') interrupt(request.cell);
  else if (request.do === 'copied' || request.do === 'ping') wire.exclusively(() => wire.write(wire.frame('hello', undefined, '-', '-')));
  else { queue.push(request); next(); }
}
const pieces = [];
const input = new net.Socket({ fd: 7, readable: true, writable: false });
function feed(data) {
  pieces.push(data);
  if (!data.includes(10)) return;
  const lines = Buffer.concat(pieces.splice(0)).toString().split('\\n');
  pieces.push(Buffer.from(lines.pop()));
  for (const line of lines) {
    let request = null;
    try { request = JSON.parse(line); } catch { continue; }  // incomplete: its writer was cut off
    take(request);
  }
}
input.on('data', feed);
input.on('end', () => process.reallyExit(0));
input.on('error', () => process.reallyExit(0));
parentPort.on('message', () => { current = null; next(); });
parentPort.postMessage(null);
`;

(rest => {
  const { Worker, MessageChannel, receiveMessageOnPort } = require('worker_threads');
  const { createRequire, isBuiltin = name => require('module').builtinModules.includes(name) } = require('module');
  const { Writable } = require('stream');
  const { pathToFileURL } = require('url');
  const fs = require('fs'), path = require('path'), util = require('util');
  const inspector = require('inspector');
  const Wire = new Function('require', `${shared}; return Wire`)(require);
  const PART_BYTES = 15 << 20, TEXT_CHARS = 1 << 20, MOST_CELLS = 1000;
  const BINARY = ['image/png', 'image/jpeg', 'application/pdf'];
  const take = Symbol.for('ringfence.take'), display_ = Symbol.for('Jupyter.display');
  const memory = new SharedArrayBuffer(128);
  const wire = new Wire(memory, 2), channel = new MessageChannel();
  const session = new inspector.Session();
  session.connect();
  const sources = new Map();  // code of cells, by the name that a trace shows
  let current = null, depth = 0, isPending = false, taken;

  // -- interrupts: frames go out whole ---------------------------------------------------------

  function whole(work) {
    depth += 1;
    try { return wire.exclusively(work); } finally {
      depth -= 1;
      if (isPending && !depth) { isPending = false; stop(); }
    }
  }
  function stop() {
    const cell = current;
    setImmediate(() => {
      depth = 0;
      if (cell && current === cell) end(cell, new KeyboardInterrupt());
    });
    session.post('Runtime.terminateExecution');
  }
  class KeyboardInterrupt extends Error {
    constructor() { super(); this.stack = 'KeyboardInterrupt'; }
  }
  class SystemExit extends Error {}
  for (const kind of [KeyboardInterrupt, SystemExit]) kind.prototype.name = kind.name;
  hide(globalThis, Symbol.for('ringfence.interrupt'), id => {
    if (!current || current.cell !== id) return;
    if (depth) isPending = true; else stop();
  });
  hide(globalThis, take, value => { taken = value; });

  // -- streams ---------------------------------------------------------------------------------

  function emit(kind, data) {
    whole(() => { wire.drain(); if (current) wire.keep(kind, data); else late(kind, data); });
  }
  const lateOutput = [];  // of timers between two cells: kept for the next one
  let lateBytes = 0;
  function late(kind, data) {
    lateBytes += data.length;
    if (lateBytes <= 1 << 20) lateOutput.push([kind, Buffer.from(data)]);
  }
  function open(kind, fd) {
    // Nothing of a stream's own state: an interrupt or a cell that ends it would leave that broken.
    function write(data, encoding, done) {
      emit(kind, typeof data === 'string' ? Buffer.from(data, typeof encoding === 'string' ? encoding : 'utf8') : Buffer.from(data));
      const told = typeof encoding === 'function' ? encoding : done;
      if (told) process.nextTick(told);
      return true;
    }
    const end = (data, encoding) => { if (data !== undefined && typeof data !== 'function') write(data, encoding); };
    return Object.assign(new Writable(), { fd, isTTY: false, _type: 'pipe', write, end, destroy() {} });
  }
  const streams = { stdout: open('out', 1), stderr: open('err', 2) };
  function restore() {
    for (const [fd, pipe] of [[1, 8], [2, 9]]) {
      let inode = -1;
      try { inode = fs.fstatSync(fd).ino; } catch {}
      if (inode === fs.fstatSync(pipe).ino) continue;
      try { fs.closeSync(fd); } catch {}
      const opened = fs.openSync(`/proc/self/fd/${pipe}`, 'w');  // the lowest number that is free
      if (opened !== fd) fs.closeSync(opened);
    }
  }
  for (const name of ['stdout', 'stderr']) {
    Object.defineProperty(process, name, { configurable: true, enumerable: true, get: () => streams[name] });
  }
  restore();
  for (const event of ['uncaughtException', 'unhandledRejection']) {
    process.on(event, error => { process.stderr.write(`Uncaught ${error && traced(error).traceback || clipped(error)}\n`); });
  }
  process.exit = code => {
    throw Object.assign(new SystemExit(String(code ?? process.exitCode ?? 0)));
  };

  // -- names of cells --------------------------------------------------------------------------

  function here() { return path.join(process.cwd(), 'cell.js'); }
  function require_(name) { return createRequire(here())(name.replace(/^npm:/, '')); }
  require_.resolve = (name, options) => createRequire(here()).resolve(name, options);
  require_.cache = require.cache;
  async function import_(name, options) {
    name = String(name).replace(/^npm:/, '');
    if (/^\.{0,2}\//.test(name)) return import(pathToFileURL(path.resolve(name)).href, options);
    if (/^[a-z][a-z0-9+.-]+:/.test(name) || isBuiltin(name)) return import(name, options);
    let found = name;
    try { found = pathToFileURL(createRequire(here()).resolve(name)).href; } catch {}  // a package of modules only
    return import(found, options);
  }
  function prompt(text = '') {
    if (!current || !current.input) throw new Error('prompt() has no input: run the cell with stdin= or on_input=');
    whole(() => { wire.drain(); wire.write(wire.frame('input', Buffer.from(String(text)))); });
    for (;;) {
      const count = Atomics.load(wire.lock, 1), answer = receiveMessageOnPort(channel.port1);
      if (answer) return answer.message;
      Atomics.wait(wire.lock, 1, count, 50);
    }
  }
  function display(...values) { for (const value of values) show('display', value); }
  for (const [name, value] of Object.entries({ require: require_, prompt, display, __ringfence_import__: import_ })) {
    hide(globalThis, name, value);
  }
  for (const name of ['module', 'exports', '__filename', '__dirname']) delete globalThis[name];
  const known = new Set(Object.getOwnPropertyNames(globalThis));
  function hide(object, name, value) { Object.defineProperty(object, name, { value, writable: true, configurable: true }); }

  // -- results ---------------------------------------------------------------------------------

  function clipped(value, most = TEXT_CHARS) {
    const text = typeof value === 'string' ? value : util.inspect(value);
    const half = most >> 1, left = text.length - most;
    return left <= 0 ? text : `${text.slice(0, half)}\n[${left} characters are left out here]\n${text.slice(-half)}`;
  }
  async function bundle(value) {
    let made = {};
    const isObject = value !== null && typeof value === 'object';
    if (isObject && typeof value[display_] === 'function') made = await value[display_]();
    else if (isObject && typeof value._toMime === 'function') made = value._toMime();
    else if (isMime(value)) made = value;
    const parts = {};
    for (const [mime, data] of Object.entries({ 'text/plain': clipped(value), ...made }).slice(0, 32)) {
      let bytes = data;
      if (!(data instanceof Uint8Array)) {
        const text = typeof data === 'string' && !mime.endsWith('json') ? data : JSON.stringify(data);
        bytes = Buffer.from(text ?? '', BINARY.includes(mime) ? 'base64' : 'utf8');
      }
      if (bytes.length <= PART_BYTES) parts[mime] = Buffer.from(bytes);
      else parts['text/plain'] = Buffer.from(`[${bytes.length} bytes of ${mime} are too large]`);
    }
    return parts;
  }
  function isMime(value) {
    const keys = value !== null && typeof value === 'object' && Object.getPrototypeOf(value) === Object.prototype ? Object.keys(value) : [];
    return keys.length > 0 && keys.every(key => /^(text|image|application)\/[\w.+-]+$/.test(key));
  }
  function show(kind, value) {
    const cell = current, made = bundle(value);
    const shown = made.then(parts => send(kind, parts, cell), error => emit('err', Buffer.from(`display: ${error}\n`)));
    if (cell) cell.shown.push(shown);
    return shown;
  }
  function send(kind, parts, cell) {
    if (cell !== current) return;
    whole(() => {
      wire.drain();
      wire.write(...Object.entries(parts).map(([name, data]) => wire.frame('part', data, name)), wire.frame(kind));
    });
  }
  function traced(error) {
    const isError = util.types.isNativeError(error) || error instanceof Error;
    if (!isError) return { name: 'Error', value: clipped(error), traceback: `Uncaught ${clipped(error)}` };
    const lines = [];
    for (const line of String(error.stack || error).split('\n')) {
      if (/^ +at .*Session\.post/.test(line)) break;  // the kernel below the cell
      if (/^ +at .*\(eval at/.test(line)) continue;
      lines.push(line);
      const [, name, number] = /(cell-\d+\.js):(\d+):\d+/.exec(line) || [];
      const source = name && (sources.get(name) || [])[number - 1];
      if (source !== undefined) lines.push(`        ${source.trim()}`);
    }
    return { name: error.constructor && error.constructor.name || error.name, value: clipped(error.message), traceback: lines.join('\n') };
  }

  // -- cells -----------------------------------------------------------------------------------

  // Scripts that the inspector compiles can import nothing: calls and declarations go through us.
  const IMPORTS = /\/\/.*|\/\*[^]*?\*\/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`|(?<![\w.$])import\s*\(|^[ \t]*import\s+(?:([\w$]+)?\s*,?\s*(?:\*\s*as\s+([\w$]+)|\{([^}]*)\})?\s*from\s*)?(["'])([^"'\n]+)\4/gm;
  function prepared(code) {
    if (!code.includes('import')) return code;
    return code.replace(IMPORTS, (text, base, all, names, _quote, from) => {
      if (/^import\s*\($/.test(text)) return '__ringfence_import__(';
      if (from === undefined) return text;
      const call = `await __ringfence_import__(${JSON.stringify(from)})`;
      const list = (names || '').split(',').map(each => each.trim().replace(/\s+as\s+/, ': ')).filter(Boolean);
      if (all) return `const ${all} = ${call}${base ? `, ${base} = ${all}.default` : ''};`;
      if (base) list.unshift(`default: ${base}`);
      return list.length ? `const { ${list.join(', ')} } = ${call};` : `${call};`;
    });
  }
  // Node's own way is of 22.13 and newer. Below it only annotations of variables, parameters and results go.
  const NAME_TYPE = String.raw`(?:[\w$.]+(?:<[\w$.<>\[\], |&]*>)?|"[^"\n]*"|'[^'\n]*')(?:\[\])*`;
  const TYPE = `${NAME_TYPE}(?:\\s*[|&]\\s*${NAME_TYPE})*`;
  const QUOTED = /\/\/.*|\/\*[^]*?\*\/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`/.source;
  const TYPED = new RegExp(`${QUOTED}|\\b((?:const|let|var)\\s+[\\w$]+)\\s*:\\s*${TYPE}(?=\\s*[=;\\n]|$)`
    + `|((?:\\bfunction\\b\\s*[\\w$]*\\s*|(?<![\\w$)\\]]\\s*))\\()([^(){}]*)\\)(?:\\s*:\\s*${TYPE})?(?=\\s*(?:\\{|=>))`, 'g');
  const PARAMETER = new RegExp(`((?:^|,)\\s*(?:\\.\\.\\.)?[\\w$]+)\\??\\s*:\\s*${TYPE}(?=\\s*(?:[=,]|$))`, 'g');
  const OF_TYPESCRIPT = /\b(?:interface|type|enum|namespace|declare|abstract|implements|satisfies|as|private|protected|public|readonly)\s/;
  const { stripTypeScriptTypes } = require('module');
  function untyped(code, types) {
    // As JavaScript `f<T>(x)` compares twice.
    if (types === 'typescript' && stripTypeScriptTypes) return stripped(code);
    try { new (require('vm').Script)(code); return code; } catch {}  // JavaScript already
    if (stripTypeScriptTypes) return stripped(code);
    return code.replace(TYPED, (text, variable, head, parameters) =>
      variable || (head ? `${head}${parameters.replace(PARAMETER, '$1')})` : text));
  }
  function stripped(code) {
    const { emitWarning } = process;
    process.emitWarning = () => {};  // that this way is experimental: nothing of the cell's
    try {
      for (const mode of ['strip', 'transform']) {  // the second for enums and the like, which are code; it moves lines
        try { return stripTypeScriptTypes(code, { mode }); } catch {}
      }
      return code;
    } finally { process.emitWarning = emitWarning; }
  }
  function hinted(cell, error) {
    const isOf = cell.types && !stripTypeScriptTypes && util.types.isNativeError(error) && error.name === 'SyntaxError';
    if (isOf && OF_TYPESCRIPT.test(cell.code)) error.message += ' (more of TypeScript than annotations needs Node.js 22.13 or newer)';
    return error;
  }
  const AsyncFunction = (async () => {}).constructor;
  function evaluated(code) {  // an object in braces is no block with labels, as in every console
    if (!/^\s*\{/.test(code) || /;\s*$/.test(code)) return code;
    try { new AsyncFunction(`return (${code}\n)`); } catch { return code; }
    return `(${code}\n)`;
  }
  function ask(method, options) {
    return new Promise((resolve, reject) => session.post(method, options, (error, found) => error ? reject(new KeyboardInterrupt()) : resolve(found)));
  }
  async function valueOf(remote) {
    if (remote.objectId) {
      await ask('Runtime.callFunctionOn', {
        objectId: remote.objectId, arguments: [{ objectId: remote.objectId }],
        functionDeclaration: 'function (value) { globalThis[Symbol.for("ringfence.take")](value); }' });
      const value = taken;
      taken = undefined;
      return value;
    }
    if (remote.unserializableValue === undefined) return remote.value;
    const text = remote.unserializableValue;
    return text.endsWith('n') ? BigInt(text.slice(0, -1)) : text === '-0' ? -0 : Number(text);
  }
  async function evaluate(code, name) {
    const found = await ask('Runtime.evaluate', {
      expression: `${code}\n//# sourceURL=${name}`, replMode: true, awaitPromise: true, userGesture: true, objectGroup: 'cell' });
    const details = found.exceptionDetails;
    const value = await valueOf(details ? details.exception || { value: details.text } : found.result);
    if (!details) return value;
    if (util.types.isNativeError(value) && value.name === 'SyntaxError' && details.lineNumber !== undefined) {
      const line = code.split('\n')[details.lineNumber];
      value.stack = `${name}:${details.lineNumber + 1}\n${line === undefined ? '' : line}\nSyntaxError: ${value.message}`;
    }
    throw value;
  }
  async function run(cell) {
    const name = `cell-${cell.count}.js`;
    sources.set(name, cell.code.split('\n'));
    if (sources.size > MOST_CELLS) sources.delete(sources.keys().next().value);
    let error, hasFailed = false;
    try {
      const code = cell.types ? untyped(cell.code, cell.types) : cell.code;
      const value = await evaluate(evaluated(prepared(code)), name);
      await Promise.all(cell.shown);
      await new Promise(setImmediate);  // rejections that nothing handles are told by now
      if (value !== undefined && current === cell) await show('main', value);
    } catch (thrown) { error = hinted(cell, thrown); hasFailed = true; }
    if (current === cell) end(cell, error, hasFailed);
  }
  async function list(cell) {
    const found = [];
    let error, hasFailed = false;
    try {
      const { names } = await ask('Runtime.globalLexicalScopeNames', {});
      const others = Object.keys(globalThis).filter(each => !known.has(each) && !isBuiltin(each));
      for (const name of [...new Set([...names, ...others])].slice(0, 1000)) {
        let value;
        try { value = await evaluate(name, 'variables'); } catch { continue; }
        const type = value === null ? 'null' : typeof value === 'object' ? (value.constructor || Object).name : typeof value;
        found.push({ name: name.slice(0, 200), type: String(type).slice(0, 200), value: clipped(util.inspect(value, { depth: 0, breakLength: Infinity }), 200) });
      }
      send('main', { 'application/json': Buffer.from(JSON.stringify(found)) }, cell);
    } catch (thrown) { error = thrown; hasFailed = true; }
    if (current === cell) end(cell, error, hasFailed);
  }
  function end(cell, error, hasFailed = true) {
    let parts = {};
    if (hasFailed) {
      try { parts = traced(error); } catch (other) {
        parts = { name: 'Error', value: 'an exception that cannot be shown', traceback: String(other && other.name) };
      }
      parts = Object.fromEntries(Object.entries(parts).map(([key, text]) => [key, Buffer.from(clipped(text))]));
      send('error', parts, cell);
    }
    session.post('Runtime.releaseObjectGroup', { objectGroup: 'cell' });
    whole(() => {
      wire.drain();
      wire.write(wire.frame('done', Buffer.from(`${cell.count} ${wire.counts[1]}`)));
      current = null;
      isPending = false;
      wire.cell = '';
      wire.counts.fill(0);
    });
    worker.postMessage(null);
  }

  // -- the worker ------------------------------------------------------------------------------

  const worker = new Worker(`${shared}\n${listener}\nfeed(Buffer.from(workerData.rest));`, {
    eval: true, workerData: { memory, answers: channel.port2, rest },
    transferList: [channel.port2], stdout: true, stderr: true });
  worker.on('error', () => process.reallyExit(1));
  worker.on('message', request => {
    if (request === null) return void wire.exclusively(() => wire.write(wire.frame('hello', undefined, '-', '-')));
    restore();
    while (receiveMessageOnPort(channel.port1));  // answers that an earlier cell did not take
    whole(() => {
      wire.cell = request.cell;
      for (const [kind, data] of lateOutput.splice(0)) wire.keep(kind, data);
      lateBytes = 0;
    });
    // Last: an interrupt from here on ends what runs, which must not hold the lock by then.
    current = { ...request, shown: [] };
    if (request.do === 'variables') list(current); else run(current);
  });
})(REST);
