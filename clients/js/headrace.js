/**
 * The Headrace client for browsers and Node: publishes to topics of a server and subscribes to
 * them, over as many connections as it takes. One file, no dependencies.
 *
 * From the top down: what an application uses (`connect`, Client, Subscription, Message), the link
 * (the WebSocket and its timers), the session (the Wombat protocol without I/O: messages and time
 * are arguments), the codec (MessagePack), and last the checks of what an application passes in.
 *
 * The manual of the API is headrace.d.ts. Exports that it does not have are for channel.js and for
 * tests only.
 */

export const PAYLOAD_BYTES_MAX = 262_144;
const TOPIC_BYTES_MAX = 255;
/** Reserved names may be one byte longer than ordinary ones. */
const RESERVED_TOPIC_BYTES_MAX = 256;
const RESERVED_PREFIX = "$";
const READER_BYTES_MAX = 255;
const TOKEN_BYTES_MAX = 8192;
/** How long the answer to a token may take. */
const AUTH_ANSWER_MS = 5000;
/** Different tokens in a row that a server may refuse before the client gives up. */
const TOKENS_REFUSED_MAX = 3;
/** The share of a token's time after which it is renewed, and the shortest time until then. */
const RENEW_AT = 0.8;
const RENEW_MS_MIN = 500;
/** Codes of AUTH_REFUSED. */
const CREDENTIALS = 1;
const LATER = 2;
const NO_TOKENS =
  "the server does not answer AUTH, so it does not know the token extension: connect without a " +
  "token, or update the server";
/** A record begins with the size of its payload. */
const RECORD_HEADER_BYTES = 4;
/** Topics whose records have an envelope: only their own protocols publish there. */
const ENVELOPE_PREFIXES = ["$logux/", "$channel/"];
/** Connections that a publish may cost in a row before it is given up. */
const REFUSALS_MAX = 3;
/** Close codes by which a server says that something is wrong with what it was sent. */
const BLAMING_CODES = new Set([1002, 1003, 1007, 1008, 1009]);

const PATH = "/v1/ws";
/** Of `wombat://`; the others have the port of their transport, as a load balancer does. */
const DEFAULT_PORT = 8120;

const DEFAULTS = {
  windowMax: 4096,
  windowBytesMax: 16 * 1024 * 1024,
  receiveBytesMax: 8 * 1024 * 1024,
  pingIntervalMs: 5000,
  resendMs: 2000,
  attemptTimeoutMs: 5000,
  flushTimeoutMs: 5000,
  jitter: 0,
};
/** As far as timers reach, and half of all sequence numbers. */
const OPTION_MAX = 2 ** 31 - 1;

export class HeadraceError extends Error {
  static {
    this.prototype.name = "HeadraceError";
  }
}

export class ConfigError extends HeadraceError {
  static {
    this.prototype.name = "ConfigError";
  }
}

export class BadTopicNameError extends HeadraceError {
  static {
    this.prototype.name = "BadTopicNameError";
  }
}

export class PayloadTooLargeError extends HeadraceError {
  static {
    this.prototype.name = "PayloadTooLargeError";
  }
}

export class LocalProtocolError extends HeadraceError {
  static {
    this.prototype.name = "LocalProtocolError";
  }
}

export class ConnectTimeoutError extends HeadraceError {
  static {
    this.prototype.name = "ConnectTimeoutError";
  }
}

export class ClientClosedError extends HeadraceError {
  static {
    this.prototype.name = "ClientClosedError";
  }
}

export class PublishRefusedError extends HeadraceError {
  static {
    this.prototype.name = "PublishRefusedError";
  }

  constructor(reason) {
    super(
      `the server hung up ${REFUSALS_MAX} times in a row when it was sent this publish, ` +
        `which is given up; its last words: ${reason}`,
    );
    this.reason = reason;
  }
}

export class ReaderLostError extends HeadraceError {
  static {
    this.prototype.name = "ReaderLostError";
  }
}

export class ReaderRefusedError extends HeadraceError {
  static {
    this.prototype.name = "ReaderRefusedError";
  }
}

export class RefusedError extends HeadraceError {
  static {
    this.prototype.name = "RefusedError";
  }
}

export class UnacknowledgedError extends HeadraceError {
  static {
    this.prototype.name = "UnacknowledgedError";
  }

  constructor(publishes, what = "publishes") {
    super(`${publishes} ${what} were not acknowledged before the client closed`);
    this.publishes = publishes;
  }
}

export function connect(url, options = {}) {
  const target = websocketUrl(url, PATH);
  const { token, ticket, insecureToken = false, ...others } = options;
  const checked = { ...checkOptions(others, DEFAULTS), token, ticket };
  checkCredentials(target, { token, ticket, insecureToken });
  return new Client(target, checked);
}

class Client {
  #options;
  #session;
  #link;
  #handlers = new Handlers("state", "missed", "reader");
  #inboxes = new Map();
  #detaching = new Set();
  /** How to settle the promise of each unacknowledged publish, in the session's order. */
  #publishes = new Fifo();
  #published = 0;
  #acknowledged = 0;
  /** The first refusal that `flush` has not told of. */
  #refusal = null;
  /** Why the client ended, other than by `close`. */
  #ending = null;
  #waiting = new Waiting(() => (this.state === "closed" ? this.#whyClosed() : null));

  constructor(url, options) {
    this.url = url;
    this.#options = options;
    this.#session = new WombatSession(options);
    this.#link = new Link(this.#session, url, options, {
      changed: (state) => this.#stateChanged(state),
      happened: (event) => this.#handle(event),
    });
  }

  get state() {
    return this.#session.state;
  }

  get latencyMs() {
    return this.#session.latencyMs;
  }

  get lastError() {
    return this.#link.lastError;
  }

  get unacknowledged() {
    return this.#session.unacknowledged;
  }

  async connected({ timeoutMs } = {}) {
    if (!(await this.#waiting.until(() => this.state === "connected", timeoutMs))) {
      const reason = this.lastError || "no answer";
      throw new ConnectTimeoutError(
        `no connection to ${this.url} within ${timeoutMs} ms: ${reason}`,
      );
    }
  }

  // Not `async`: that would wrap the promise, and the wrapper would count as unhandled.
  publish(topic, payload) {
    try {
      this.#mustBeOpen();
      this.#session.publish(topic, bytesOf(payload));
    } catch (error) {
      return Promise.reject(error);
    }
    this.#published += 1;
    const acknowledged = new Promise((resolve, reject) => {
      this.#publishes.push({ resolve, reject });
    });
    // Rejected only by `close` and by a refusal, of which `close` and `flush` tell themselves: one who
    // publishes many and then waits in `flush` has no need to look at each promise.
    acknowledged.catch(() => {});
    this.#link.send();
    return acknowledged;
  }

  async window() {
    await this.#waiting.until(() => this.#session.hasRoom);
  }

  async flush() {
    await this.#flushed();
    const refusal = this.#refusal;
    this.#refusal = null;
    if (refusal !== null) throw refusal;
  }

  subscribe(topic, handler, options) {
    if (typeof handler !== "function") [handler, options] = [undefined, handler ?? options];
    this.#mustBeOpen();
    if (this.#inboxes.has(topic)) {
      throw new LocalProtocolError(`"${topic}" is already subscribed on this client`);
    }
    if (options?.reader !== undefined) return this.#read(topic, handler, options);
    const serial = startOf(options ?? {});
    this.#session.attach(topic, serial);
    this.#detaching.delete(topic);
    const inbox = new Inbox(serial, this.#options.receiveBytesMax, () => {
      this.#session.attach(topic, inbox.received);
      this.#link.send();
    });
    this.#inboxes.set(topic, inbox);
    this.#link.send();
    this.#waiting.wake();
    if (handler) callForEach(inbox, handler);
    return new Subscription(topic, inbox, {
      handled: handler !== undefined,
      unsubscribe: () => this.#unsubscribe(topic, inbox),
    });
  }

  #read(topic, handler, options) {
    const { reader, start, ack } = readerOf(options);
    const window = this.#options.receiveBytesMax;
    this.#session.read(topic, { reader, newest: start === "newest", window });
    const inbox = new ReaderInbox(topic, reader, ack === "auto", {
      handled: (offset) => {
        const isOurs = this.#session.handled(topic, offset);
        if (isOurs) this.#link.send();
        return isOurs;
      },
      until: (condition) => this.#waiting.until(condition),
      isSure: () => {
        const now = performance.now();
        if (this.#session.isSure(topic, now)) return true;
        this.#session.makeSure(now);
        this.#link.send();
        return false;
      },
      handledUpTo: () => this.#session.handledUpTo(topic),
    });
    this.#inboxes.set(topic, inbox);
    this.#link.send();
    const unsubscribe = () => this.#unsubscribe(topic, inbox);
    if (handler) callUntilOneFails(inbox, handler, unsubscribe);
    return new ReaderSubscription(topic, inbox, { handled: handler !== undefined, unsubscribe });
  }

  on(name, handler) {
    return this.#handlers.on(name, handler);
  }

  async close({ flushMs = this.#options.flushTimeoutMs } = {}) {
    let unacknowledged = 0;
    if (flushMs > 0 && this.state === "connected") {
      const stored = () => [...this.#inboxes.values()].every((inbox) => inbox.isStored ?? true);
      await this.#waiting.until(stored, flushMs).catch(() => {}); // closed by another call
    }
    if (flushMs > 0 && this.unacknowledged > 0 && this.state !== "closed") {
      const flushed = await this.#flushed(flushMs).catch(() => false); // closed by another call
      if (!flushed) unacknowledged = this.unacknowledged;
    }
    if (this.state !== "closed") this.#shut();
    await this.#link.stop();
    if (unacknowledged > 0) throw new UnacknowledgedError(unacknowledged);
  }

  #flushed(timeoutMs) {
    const published = this.#published;
    return this.#waiting.until(() => this.#acknowledged >= published, timeoutMs);
  }

  async #unsubscribe(topic, inbox) {
    if (this.#inboxes.get(topic) === inbox) {
      this.#inboxes.delete(topic);
      inbox.end(new HeadraceError(`the subscription of "${topic}" ended before it began`));
      if (this.#session.detach(topic)) this.#detaching.add(topic);
      this.#link.send();
    }
    // Closing detaches too.
    await this.#waiting.until(() => !this.#detaching.has(topic)).catch(() => {});
  }

  #whyClosed() {
    return this.#ending ?? new ClientClosedError("the client is closed");
  }

  #shut() {
    this.#session.close();
    const error = this.#whyClosed();
    for (const inbox of this.#inboxes.values()) inbox.end(error, this.#ending !== null);
    this.#inboxes.clear();
    while (this.#publishes.length > 0) this.#publishes.shift().reject(error);
    this.#stateChanged("closed");
  }

  #handle(event) {
    switch (event.kind) {
      case "acknowledged":
        this.#acknowledged += event.publishes;
        for (let n = 0; n < event.publishes; n += 1) this.#publishes.shift().resolve();
        break;
      case "refused": {
        const error = new PublishRefusedError(event.reason);
        this.#acknowledged += 1;
        this.#refusal ??= error;
        this.#publishes.shift().reject(error);
        break;
      }
      case "message":
        if (!this.#inboxes.get(event.topic).push(new Message(event))) {
          // A WebSocket cannot be told to wait, so a subscription that is over its bound leaves the
          // topic, and comes back where it stopped when the application has caught up.
          this.#session.detach(event.topic);
        }
        break;
      case "attached":
        this.#inboxes.get(event.topic).begin(event.serial);
        break;
      case "detached":
        this.#detaching.delete(event.topic);
        break;
      case "accessRefused":
        this.#ending = new RefusedError(event.reason);
        this.#shut();
        this.#link.stop();
        return;
      case "missed":
        this.#handlers.tell("missed", { topic: event.topic, asked: event.asked, got: event.got });
        break;
      case "records":
      case "stored":
      case "reader":
      case "readerFailed":
        this.#ofReader(event);
        break;
    }
    this.#waiting.wake();
  }

  #ofReader(event) {
    const { kind, topic } = event;
    const inbox = this.#inboxes.get(topic);
    if (!(inbox instanceof ReaderInbox)) return; // a handler of an event before this one has ended it
    if (kind === "records") inbox.push(event);
    else if (kind === "stored") inbox.acknowledged = event.offset;
    else if (kind === "readerFailed") {
      this.#inboxes.delete(topic);
      const why = `"${topic}" cannot be read as "${inbox.reader}": ${event.reason}`;
      inbox.end(new ReaderRefusedError(why), true);
    } else {
      const { state, reason = "", serial } = event;
      if (state === "active") inbox.begin(serial);
      if (state === "lost") inbox.lost();
      this.#handlers.tell("reader", { topic, reader: inbox.reader, state, reason });
    }
  }

  #stateChanged(state) {
    if (state === "disconnected") this.#detaching.clear(); // the server has forgotten them with it
    this.#waiting.wake();
    this.#handlers.tell("state", state);
  }

  #mustBeOpen() {
    if (this.state === "closed") throw this.#whyClosed();
  }
}

/** What one topic brings; an async iterator that ends when unsubscribed or closed. */
class Subscription {
  #inbox;
  #hooks;

  constructor(topic, inbox, hooks) {
    this.topic = topic;
    this.#inbox = inbox;
    this.#hooks = hooks;
  }

  get serial() {
    return this.#inbox.taken;
  }

  attached() {
    return this.#inbox.attached;
  }

  unsubscribe() {
    return this.#hooks.unsubscribe();
  }

  async next() {
    if (this.#hooks.handled) {
      throw new LocalProtocolError(`the messages of "${this.topic}" go to its handler`);
    }
    const value = await this.#inbox.next();
    return { value, done: value === undefined };
  }

  // No `return`: leaving a loop keeps the subscription, and the next loop goes on with it.
  [Symbol.asyncIterator]() {
    return this;
  }
}

/** The same for a named reader, with acknowledgements. */
class ReaderSubscription extends Subscription {
  #inbox;

  constructor(topic, inbox, hooks) {
    super(topic, inbox, hooks);
    this.#inbox = inbox;
    this.reader = inbox.reader;
  }

  get acknowledged() {
    return this.#inbox.acknowledged;
  }

  get losses() {
    return this.#inbox.losses;
  }

  ack(message) {
    this.#inbox.ack(message);
  }

  flush() {
    return this.#inbox.flush();
  }
}

class Message {
  #epoch;

  constructor({ topic, serial, payload, ordinal = null, epoch = null, time = null }) {
    this.topic = topic;
    this.serial = serial;
    this.payload = payload;
    this.ordinal = ordinal;
    this.#epoch = epoch;
    this.time = time;
  }

  get epoch() {
    return this.#epoch ?? naturalOf(/^(\d+)@\d+$/.exec(this.serial));
  }

  get nextOffset() {
    return naturalOf(/^\d+@(\d+)$/.exec(this.serial));
  }

  get offset() {
    const next = this.nextOffset;
    return next === null ? null : next - RECORD_HEADER_BYTES - this.payload.length;
  }

  text() {
    return new TextDecoder().decode(this.payload);
  }
}

/** The number that an expression has found; null when there is none, or one beyond 2⁵³. */
function naturalOf(match) {
  const number = Number(match?.[1] ?? NaN);
  return Number.isSafeInteger(number) ? number : null;
}

/** Messages received and not yet taken, bounded. Knows no protocol. */
class Inbox {
  static MESSAGE_OVERHEAD_BYTES = 128;

  #bytesMax;
  #caughtUp;
  #messages = new Fifo();
  #bytes = 0;
  #over = false;
  #takers = new Fifo();
  #ended = false;
  #failure = null;
  #begun;

  constructor(serial, bytesMax, caughtUp) {
    /** The serial of the last message taken, or where delivery begins. */
    this.taken = serial;
    /** The same of the last message received. */
    this.received = serial;
    this.#bytesMax = bytesMax;
    this.#caughtUp = caughtUp;
    this.attached = new Promise((resolve, reject) => {
      this.#begun = { resolve, reject };
    });
    this.attached.catch(() => {}); // whoever asks hears of it
  }

  /** The server delivers the topic from here; also called on every later connection. */
  begin(serial) {
    this.taken ??= serial;
    this.received = serial;
    this.#begun.resolve(serial);
  }

  /** False asks for no more until `caughtUp` is called. */
  push(message) {
    this.received = message.serial;
    if (this.#takers.length > 0) {
      this.taken = message.serial;
      this.#takers.shift()(message);
    } else {
      this.#messages.push(message);
      this.#bytes += sizeOf(message);
      this.#over = this.#bytes > this.#bytesMax;
    }
    return !this.#over;
  }

  /** The next message; undefined when there will be none. */
  async next() {
    if (this.#failure !== null) throw this.#failure;
    if (this.#ended) return undefined;
    if (this.#messages.length === 0) {
      const message = await new Promise((resolve) => this.#takers.push(resolve));
      if (message === undefined && this.#failure !== null) throw this.#failure;
      return message;
    }
    const message = this.#messages.shift();
    this.taken = message.serial;
    this.#bytes -= sizeOf(message);
    if (this.#over && this.#bytes <= this.#bytesMax / 2) {
      this.#over = false;
      this.#caughtUp();
    }
    return message;
  }

  /** What was not taken is dropped. Those who take messages get the error if it `isFailure`. */
  end(error, isFailure = false) {
    this.#ended = true;
    if (isFailure) this.#failure = error;
    this.#messages = new Fifo();
    while (this.#takers.length > 0) this.#takers.shift()(undefined);
    this.#begun.reject(error);
  }

  get ended() {
    return this.#ended;
  }
}

/** Messages of a named reader: received and not yet taken, taken and not yet acknowledged. */
class ReaderInbox {
  /** How long an application that never waits may keep its acknowledgements from being sent. */
  static TURN_MS = 10;

  /** The serial of the last message taken, or where delivery began. */
  taken = null;
  /** The offset up to which everything is acknowledged, durably. */
  acknowledged = null;
  /** How often unacknowledged messages went to another process. */
  losses = 0;
  ended = false;
  #isAuto;
  #client;
  #messages = new Fifo();
  /** How many ask for the next message. */
  #takers = 0;
  /** When others are next given a turn. */
  #turnAt = 0;
  /** The message that asking for the next one acknowledges. */
  #unhandled = null;
  #failure = null;
  #begun;

  constructor(topic, reader, isAuto, client) {
    this.topic = topic;
    this.reader = reader;
    this.#isAuto = isAuto;
    this.#client = client;
    this.attached = new Promise((resolve, reject) => {
      this.#begun = { resolve, reject };
    });
    this.attached.catch(() => {}); // whoever asks hears of it
  }

  get isStored() {
    return this.acknowledged === null || this.acknowledged >= this.#client.handledUpTo();
  }

  begin(serial) {
    this.taken ??= serial;
    this.#begun.resolve(serial);
  }

  /** The server sends no more than the window that it was told. */
  push({ topic, epoch, ordinal, time, messages }) {
    for (const { offset, payload } of messages) {
      const serial = `${epoch}@${offset}`;
      this.#messages.push(new Message({ topic, serial, payload, ordinal, epoch, time }));
      ordinal += 1;
    }
  }

  /** The next message; undefined when there will be none. */
  async next() {
    if (this.#isAuto && this.#takers > 0) {
      throw new LocalProtocolError(
        `several loops take messages of "${this.topic}", so it is not known which of them has ` +
          'handled which: subscribe with ack: "manual"',
      );
    }
    if (this.#unhandled !== null) this.#client.handled(this.#unhandled.nextOffset);
    this.#unhandled = null;
    this.#takers += 1;
    try {
      if (performance.now() >= this.#turnAt) {
        await othersRun();
        this.#turnAt = performance.now() + ReaderInbox.TURN_MS;
      }
      // Several may wait for one message.
      while (!this.#mayTake()) await this.#client.until(() => this.#mayTake());
    } finally {
      this.#takers -= 1;
    }
    if (this.#failure !== null) throw this.#failure;
    return this.ended ? undefined : this.#take();
  }

  /** A message that another process may have by now is given out only when the server was asked. */
  #mayTake() {
    return this.ended || (this.#messages.length > 0 && this.#client.isSure());
  }

  ack(message) {
    if (message?.topic !== this.topic) {
      throw new LocalProtocolError(`this is not a message of "${this.topic}"`);
    }
    if (!this.#client.handled(message.nextOffset)) {
      if (this.acknowledged !== null && message.nextOffset <= this.acknowledged) return;
      throw this.#lostError();
    }
  }

  async flush() {
    const losses = this.losses;
    const until = this.#client.handledUpTo();
    const isStored = () => (this.acknowledged ?? 0) >= until;
    await this.#client.until(() => isStored() || this.losses !== losses || this.ended);
    if (this.losses !== losses) throw this.#lostError();
    if (!isStored()) {
      throw this.#failure ?? new HeadraceError(`the subscription of "${this.topic}" has ended`);
    }
  }

  /** What was not taken goes to another process. */
  lost() {
    this.losses += 1;
    this.#messages = new Fifo();
    this.#unhandled = null;
  }

  /** What was not taken is dropped; with `failed`, who takes hears of the error. */
  end(error, failed = false) {
    this.ended = true;
    if (failed) this.#failure = error;
    this.#messages = new Fifo();
    this.#begun.reject(error);
  }

  #take() {
    const message = this.#messages.shift();
    this.taken = message.serial;
    if (this.#isAuto) this.#unhandled = message;
    return message;
  }

  #lostError() {
    return new ReaderLostError(
      `the reader "${this.reader}" of "${this.topic}" is, or was, active in another process: ` +
        "messages that were not acknowledged are delivered there",
    );
  }
}

/** A message whose handler fails is not acknowledged, and none behind it is given out. */
async function callUntilOneFails(inbox, handler, unsubscribe) {
  try {
    for (let message; (message = await inbox.next()) && !inbox.ended;) await handler(message);
  } catch (error) {
    report(error);
    await unsubscribe();
  }
}

/** Let events and timers happen: a promise alone does not. Timers would be slow in a hidden page. */
function othersRun() {
  if (typeof setImmediate === "function") return new Promise((resolve) => setImmediate(resolve));
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

function sizeOf(message) {
  return message.payload.length + Inbox.MESSAGE_OVERHEAD_BYTES;
}

/** One call after the other: a handler that returns a promise is waited for, within the bound. */
async function callForEach(inbox, handler) {
  for (let message; (message = await inbox.next()) && !inbox.ended;) {
    try {
      await handler(message);
    } catch (error) {
      report(error);
    }
  }
}

/** Functions of the application that are told of events, by name. */
export class Handlers {
  #registrations;

  constructor(...names) {
    this.#registrations = new Map(names.map((name) => [name, new Set()]));
  }

  /** Returns a function that removes the handler. */
  on(name, handler) {
    const registrations = this.#registrations.get(name);
    if (registrations === undefined) {
      const names = [...this.#registrations.keys()].map((known) => `"${known}"`).join(" and ");
      throw new TypeError(`there is no event "${name}", only ${names}`);
    }
    mustBe("function", handler, "a handler");
    const registration = { handler };
    registrations.add(registration);
    return () => {
      registrations.delete(registration);
    };
  }

  tell(name, event) {
    for (const { handler } of [...this.#registrations.get(name)]) {
      try {
        handler(event);
      } catch (error) {
        report(error);
      }
    }
  }
}

/** Those who wait until something is so. They look again whenever something happened. */
export class Waiting {
  #looks = new Set();
  #whyOver;

  /** `whyOver` gives the error that ends all waiting, or null. */
  constructor(whyOver) {
    this.#whyOver = whyOver;
  }

  /** Whether the condition came true within the time. */
  until(condition, timeoutMs) {
    return new Promise((resolve, reject) => {
      const over = this.#whyOver();
      if (over !== null) return reject(over);
      if (condition()) return resolve(true);
      const settle = (settler, value) => {
        this.#looks.delete(look);
        clearTimeout(timer);
        settler(value);
      };
      const look = () => {
        if (condition()) return settle(resolve, true);
        const error = this.#whyOver();
        if (error !== null) settle(reject, error);
      };
      let timer;
      if (timeoutMs !== undefined) {
        timer = setTimeout(settle, Math.min(timeoutMs, OPTION_MAX), resolve, false);
      }
      this.#looks.add(look);
    });
  }

  wake() {
    for (const look of this.#looks) look();
  }
}

/** Keeps a session connected: makes WebSockets one after the other, moves messages and time. */
export class Link {
  /** What may wait in the WebSocket: publishes beyond it stay where a PING can overtake them. */
  static SEND_BUFFER_BYTES_MAX = 256 * 1024;
  /** A WebSocket does not say when its buffer has room. */
  static DRAIN_POLL_MS = 10;
  /** When a function that has given no token is asked again. */
  static RENEW_RETRY_MS = 1000;
  /** How long a closing WebSocket may take to get its last bytes out. */
  static CLOSE_TIMEOUT_MS = 1000;

  lastError = "";
  #session;
  #url;
  #options;
  #client;
  #socket = null;
  #open = false;
  /** For the attempt under way, or for the wait before the next one. */
  #attemptTimer;
  /** The attempt that has no WebSocket yet, because the application is asked for a token. */
  #preparing = null;
  #drainTimer;
  #tickTimer;
  #tickTimerAt = Infinity;

  constructor(session, url, options, client) {
    this.#session = session;
    this.#url = url;
    this.#options = options;
    this.#client = client;
    this.#connect();
  }

  /** Hand the WebSocket what the session has for it, as far as there is room. */
  send() {
    if (!this.#open) return;
    const socket = this.#socket;
    const now = performance.now();
    for (const data of this.#session.controlToSend(now)) socket.send(data);
    while (socket.bufferedAmount < Link.SEND_BUFFER_BYTES_MAX) {
      const data = this.#session.publishToSend(now);
      if (data === null) break;
      socket.send(data);
    }
    if (socket.bufferedAmount >= Link.SEND_BUFFER_BYTES_MAX && this.#drainTimer === undefined) {
      this.#drainTimer = setTimeout(() => {
        this.#drainTimer = undefined;
        this.send();
      }, Link.DRAIN_POLL_MS);
    }
    this.#schedule(now);
  }

  /** End for good; resolves when what was sent is out, or takes too long. */
  async stop() {
    const wasOpen = this.#open;
    const socket = this.#forget();
    if (socket === null) return;
    const closed = wasOpen && untilClosed(socket, Link.CLOSE_TIMEOUT_MS);
    socket.close(1000);
    await closed;
    abandon(socket);
  }

  /** Send what the session has, and be without a connection until `resume`. */
  suspend() {
    this.send();
    const socket = this.#forget();
    this.lastError = "the page is hidden";
    this.#session.disconnected();
    this.#client.changed(this.#session.state);
    socket?.close(1000);
  }

  resume() {
    if (this.#socket !== null || this.#preparing !== null) return;
    clearTimeout(this.#attemptTimer);
    this.#connect();
  }

  #connect() {
    this.#session.connecting();
    this.#client.changed(this.#session.state);
    if (this.#session.state === "closed") return; // by a handler
    const { attemptTimeoutMs, token, ticket } = this.#options;
    this.#attemptTimer = setTimeout(() => {
      this.#drop(`no answer within ${attemptTimeoutMs} ms`);
    }, attemptTimeoutMs);
    if (typeof token !== "function" && ticket === undefined) {
      this.#session.token = token;
      this.#dial(this.#url);
      return;
    }
    const attempt = Symbol("attempt");
    this.#preparing = attempt;
    Promise.all([asked(token, "token"), asked(ticket, "ticket")]).then(
      ([token, ticket]) => {
        if (attempt !== this.#preparing) return;
        this.#preparing = null;
        this.#session.token = token;
        this.#dial(ticket === undefined ? this.#url : withTicket(this.#url, ticket));
      },
      ({ message }) => {
        if (attempt === this.#preparing) this.#lost(message);
      },
    );
  }

  #dial(url) {
    let socket;
    try {
      socket = new this.#options.WebSocket(url);
    } catch (error) {
      this.#lost(error.message);
      return;
    }
    this.#socket = socket;
    socket.binaryType = "arraybuffer";
    // Listeners stay when a socket is given up, and then find that it is not the current one.
    const listen = (name, listener) => {
      socket.addEventListener(name, (event) => {
        if (socket === this.#socket) listener(event);
      });
    };
    let failure;
    listen("open", () => this.#opened());
    listen("message", ({ data }) => this.#received(data));
    listen("error", (event) => {
      failure = event.message; // Node says why; browsers do not tell pages
      // Node 20 lets no "close" follow when no connection came about.
      if (!this.#open) this.#drop(failure || "the server cannot be reached");
    });
    listen("close", (event) => {
      const reason = whyClosed(event, failure);
      // Sessions of other protocols have words for what a server does not take.
      for (const one of this.#session.hungUp?.(event.code, reason) ?? []) this.#client.happened(one);
      if (socket !== this.#socket) return; // a handler has closed the client
      this.#lost(this.#session.explain?.(reason) ?? reason);
    });
  }

  /** Get a new token for the open connection, if the application has more than one. */
  #renew() {
    const socket = this.#socket;
    this.#session.renewAt = Infinity;
    const { token } = this.#options;
    if (typeof token !== "function") return;
    asked(token, "token").then(
      (fresh) => {
        if (socket !== this.#socket || socket === null) return;
        this.#session.renew(fresh, performance.now());
        this.send();
      },
      () => {
        // The present token is still good. If it expires, the next attempt tells why there is none.
        if (socket !== this.#socket || socket === null) return;
        this.#session.renewAt = performance.now() + Link.RENEW_RETRY_MS;
        this.#schedule(performance.now());
      },
    );
  }

  #opened() {
    clearTimeout(this.#attemptTimer);
    this.#open = true;
    this.#session.opened(performance.now());
    this.send();
  }

  #received(data) {
    const socket = this.#socket;
    const before = this.#session.state;
    const events = this.#session.receive(data, performance.now());
    if (this.#session.state !== before) {
      this.lastError = "";
      this.#client.changed(this.#session.state);
    }
    this.#take(events, socket);
    // Not left to the timer alone: browsers let timers of hidden pages wait for up to a minute.
    if (socket === this.#socket) this.#tick();
  }

  #tick() {
    const socket = this.#socket;
    const drained = socket.bufferedAmount === 0;
    if (performance.now() >= this.#session.renewAt) this.#renew();
    this.#take(this.#session.tick(performance.now(), drained), socket);
    if (socket === this.#socket) this.send();
  }

  #take(events, socket) {
    for (const event of events) {
      if (socket !== this.#socket) return; // a handler has closed the client
      if (event.kind === "broken") this.#drop(event.reason);
      else this.#client.happened(event);
    }
  }

  #schedule(now) {
    const at = this.#session.tickAt;
    if (at >= this.#tickTimerAt) return; // a timer that fires too early only looks again
    clearTimeout(this.#tickTimer);
    this.#tickTimerAt = at;
    const waitMs = Math.max(0, Math.ceil(at - now));
    this.#tickTimer = setTimeout(() => {
      this.#tickTimerAt = Infinity;
      this.#tick();
    }, waitMs);
  }

  #drop(reason) {
    const socket = this.#socket;
    this.#lost(reason);
    abandon(socket);
  }

  #lost(reason) {
    this.#forget();
    this.lastError = reason;
    const waitMs = this.#session.disconnected();
    this.#attemptTimer = setTimeout(() => this.#connect(), waitMs);
    this.#client.changed(this.#session.state);
  }

  #forget() {
    clearTimeout(this.#attemptTimer);
    clearTimeout(this.#drainTimer);
    clearTimeout(this.#tickTimer);
    this.#preparing = null;
    this.#drainTimer = undefined;
    this.#tickTimerAt = Infinity;
    const socket = this.#socket;
    this.#socket = null;
    this.#open = false;
    return socket;
  }
}

/** What the application gives for a token or a ticket: a text, or a function that is asked for one. */
async function asked(given, what) {
  if (typeof given !== "function") return given;
  let found;
  try {
    found = await given();
  } catch (error) {
    throw new HeadraceError(`the function for the ${what} failed: ${error?.message ?? error}`);
  }
  const fault = faultOf(found);
  if (fault !== "") throw new HeadraceError(`the function for the ${what} gave ${fault}`);
  return found;
}

/** What is wrong with a token or a ticket, without showing it. */
function faultOf(token) {
  if (typeof token !== "string") return `no text, but ${typeof token}`;
  if (token.length === 0 || token.length > TOKEN_BYTES_MAX) return "one of a wrong length";
  return /^[!-~]*$/.test(token) ? "" : "one with characters that none has";
}

function withTicket(url, ticket) {
  const made = new URL(url);
  made.searchParams.set("ticket", ticket);
  return made.href;
}

function untilClosed(socket, timeoutMs) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, timeoutMs);
    socket.addEventListener("close", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** Close without waiting for a peer that may be gone, where the WebSocket can, as that of `ws`. */
function abandon(socket) {
  if (socket === null) return;
  if (typeof socket.terminate === "function") socket.terminate();
  else socket.close();
}

function whyClosed({ code, reason }, failure) {
  // Two codes never come over the wire: none was sent, or the connection ended without one.
  if (code === 1005) return "the server closed the connection";
  if (code === 1006) return failure || "the connection broke";
  return `the server closed the connection: ${code} ${reason}`.trimEnd();
}

/**
 * The Wombat protocol of one client over all its connections, without I/O, promises or clocks.
 * Times are milliseconds of one monotonic clock.
 *
 * A client outlives its connections. What the server must know is kept here as state, never as
 * bytes in flight: the topics wanted and the last serial of each, and the publishes not yet
 * acknowledged. A new connection is told all of it, so what the old one had lost is sent anew.
 *
 * An open connection is used at once, but is "connected" only when the peer has proved that it
 * speaks Wombat, at the latest with the PONG for the PING that is sent first: any port takes
 * connections.
 *
 * Each topic is in one of these states. A cell is the next state and what is sent; `-` cannot
 * happen or is ignored. No ATTACH follows a DETACH before its DETACHED has come: so every ATTACHED
 * and PAYLOAD that is looked at belongs to the newest ATTACH, and answers need no counting.
 *
 *     state        attach()     detach()   ATTACHED  PAYLOAD  DETACHED   disconnected()  opened()
 *     (none)       attaching    -          -         -        -          -               -
 *                  ATTACH
 *     attaching    -            detaching  attached  -        broken     attaching       attaching
 *                               DETACH                                                   ATTACH
 *     attached     -            detaching  -         deliver  broken     attaching       -
 *                               DETACH
 *     detaching    reattaching  -          -         -        (none)     (none)          -
 *     reattaching  -            detaching  -         -        attaching  attaching       -
 *                                                             ATTACH
 *
 * Without a connection nothing is sent, and `detach` leads straight to (none).
 */
export class WombatSession {
  state = "disconnected";
  latencyMs = null;
  #options;
  #open = false;
  #attempts = 0;
  #topics = new Map();
  #readers;
  #control = [];
  /** All unacknowledged publishes in order. The first `#sent` of them are on this connection. */
  #publishes = new Fifo();
  #publishesBytes = 0;
  #sent = 0;
  #sentBytes = 0;
  /** Those of the sent ones that must be sent once more. */
  #again = new Fifo();
  #nextNumber;
  #pingAt = Infinity;
  /** The PING without a PONG. */
  #ping = null;
  /** Until when the last answered PING proves that the server has not given this client up. */
  #sureUntil = -Infinity;
  /** Whether someone waits for a PONG. */
  #isAsked = false;
  /** No publish is due to be sent again before this. */
  #againAt = Infinity;
  /** How many connections in a row the oldest publish has cost, and whether this one is the next. */
  #refusals = 0;
  #wasHungUp = false;

  constructor({ firstNumber = 0, random = Math.random, ...options } = {}) {
    this.#options = { ...DEFAULTS, random, ...options };
    this.#nextNumber = firstNumber;
    this.#readers = new ReaderSessions(Math.floor(Math.random() * 2 ** 53), (name, fields) => {
      this.#control.push(encode(name, fields));
    });
  }

  /** The token to show when the next connection stands; undefined for none. */
  token = undefined;
  /** When the link gets a new token. */
  renewAt = Infinity;
  /** From AUTH to its first answer. Nothing else is sent until then. */
  #authenticating = false;
  #answerAt = Infinity;
  #refusedToken = undefined;
  #tokensRefused = 0;

  get unacknowledged() {
    return this.#publishes.length;
  }

  get hasRoom() {
    const { windowMax, windowBytesMax } = this.#options;
    return this.#publishes.length < windowMax && this.#publishesBytes < windowBytesMax;
  }

  /** When `tick` is next due. */
  get tickAt() {
    const at = Math.min(this.#pingAt, this.#againAt, this.#readers.tickAt);
    return Math.min(at, this.#answerAt, this.renewAt);
  }

  connecting() {
    this.state = "connecting";
  }

  /** A fresh connection stands. */
  opened(now) {
    if (this.token === undefined) return this.#begin(now);
    this.#authenticating = true;
    this.#sendToken(now);
  }

  /** Show another token on the open connection. */
  renew(token, now) {
    if (!this.#open) return;
    this.token = token;
    this.#sendToken(now);
  }

  /** Why a connection ended, with what the session knows of it. */
  explain(reason) {
    return this.#authenticating ? `${reason}: ${NO_TOKENS}` : reason;
  }

  #sendToken(now) {
    this.#answerAt = now + AUTH_ANSWER_MS;
    this.#control.push(encode("auth", { token: this.token }));
  }

  #begin(now) {
    this.#open = true;
    this.#sendPing(now);
    for (const [name, topic] of this.#topics) this.#sendAttach(name, topic);
    this.#readers.opened(now);
  }

  #authOk(validMs, now) {
    this.#answerAt = Infinity;
    this.#refusedToken = undefined;
    this.#tokensRefused = 0;
    if (validMs > 0) this.renewAt = now + Math.max(RENEW_AT * validMs, RENEW_MS_MIN);
    if (this.#authenticating) {
      this.#authenticating = false;
      this.#begin(now);
    }
    return [];
  }

  #authRefused({ code, reason }) {
    this.#authenticating = false;
    this.#answerAt = Infinity;
    const isSame = this.token === this.#refusedToken;
    let isLast = code !== LATER;
    if (code === CREDENTIALS) {
      this.#refusedToken = this.token;
      this.#tokensRefused += 1;
      const mayChange = typeof this.#options.token === "function";
      isLast = !mayChange || isSame || this.#tokensRefused >= TOKENS_REFUSED_MAX;
    }
    const text = `the server refuses the credentials: ${reason}`;
    return isLast ? [{ kind: "accessRefused", reason: text }] : [broken(text)];
  }

  /**
   * The server has closed the connection; `disconnected` follows.
   *
   * A publish that a server never takes must not be sent for ever. It counts against the oldest
   * unacknowledged one when the server has spoken, was sent that publish, and then closed with a code
   * that blames us. After two such connections in a row it is sent alone; after REFUSALS_MAX it is
   * given up. Any acknowledgement, and any other end, begins the count anew.
   */
  hungUp(code, reason) {
    if (!BLAMING_CODES.has(code) || this.state !== "connected" || this.#sent === 0) return [];
    this.#wasHungUp = true;
    this.#refusals += 1;
    if (this.#refusals < REFUSALS_MAX) return [];
    this.#refusals = 0;
    this.#shift();
    this.#sent -= 1;
    return [{ kind: "refused", reason }];
  }

  /** The attempt failed or the connection ended. Returns how long to wait before the next one. */
  disconnected() {
    this.state = "disconnected";
    if (!this.#wasHungUp) this.#refusals = 0;
    this.#wasHungUp = false;
    this.#open = this.#authenticating = false;
    this.#answerAt = this.renewAt = Infinity;
    this.#control = [];
    this.#sent = 0;
    this.#sentBytes = 0;
    this.#again = new Fifo();
    this.#pingAt = Infinity;
    this.#ping = null;
    this.#sureUntil = -Infinity;
    this.#againAt = Infinity;
    for (const [name, topic] of this.#topics) {
      if (topic.state === "detaching") this.#topics.delete(name);
      else topic.state = "attaching";
    }
    this.#readers.disconnected();
    const { jitter, random } = this.#options;
    const waitMs = 100 * Math.min(2 ** this.#attempts, 100) * (1 - jitter * random());
    this.#attempts += 1;
    return waitMs;
  }

  /** The application is done; nothing follows. */
  close() {
    this.state = "closed";
  }

  /** Take a publish, also without a connection. What is over the window is sent later. */
  publish(topic, payload) {
    checkTopic(topic);
    if (topic.startsWith(RESERVED_PREFIX)) {
      throw new BadTopicNameError(
        ENVELOPE_PREFIXES.some((prefix) => topic.startsWith(prefix))
          ? `topic "${topic}" is published to by its own protocol only`
          : `topic "${topic}" is reserved, as every name that begins with "$": choose another name`,
      );
    }
    if (payload.length > PAYLOAD_BYTES_MAX) {
      throw new PayloadTooLargeError(
        `a payload may have ${PAYLOAD_BYTES_MAX} bytes, this one has ${payload.length}`,
      );
    }
    const number = this.#nextNumber;
    const data = encode("publish", { topic, message: payload, sequence_number: number });
    this.#nextNumber = uint32(number + 1);
    this.#publishes.push({ data, sentAt: 0, acknowledged: false });
    this.#publishesBytes += data.length;
  }

  /** Ask for a topic from a serial, or from its end. */
  attach(name, serial) {
    checkTopic(name);
    const topic = this.#topics.get(name);
    if (topic === undefined) {
      const fresh = { state: "attaching", serial };
      this.#topics.set(name, fresh);
      if (this.#open) this.#sendAttach(name, fresh);
    } else {
      topic.state = "reattaching";
      topic.serial = serial;
    }
  }

  /** Ask for a topic under a reader's name; `detach` ends that too. */
  read(name, { reader, newest, window }) {
    checkTopic(name);
    // READ follows a DETACH only when that is answered, as ATTACH does.
    this.#readers.read(name, { reader, newest, window }, this.#topics.has(name));
  }

  /** The application has handled a message of a reader; false if it is not, or no longer, ours. */
  handled(name, offset) {
    return this.#readers.handled(name, offset);
  }

  handledUpTo(name) {
    return this.#readers.handledUpTo(name);
  }

  /** True while no other client can have been given this reader's messages. */
  isSure(name, now) {
    return now < this.#sureUntil && this.#readers.isActive(name);
  }

  /** Ask the server, unless it is being asked; "answered", or another event of the reader, tells. */
  makeSure(now) {
    this.#isAsked = true;
    if (this.#open && this.#ping === null) this.#sendPing(now);
  }

  /** Ask for a topic no more. Returns whether a "detached" will come, if the connection lasts. */
  detach(name) {
    if (this.#readers.stop(name) && this.#open && !this.#topics.has(name)) {
      this.#topics.set(name, { state: "attached" });
    }
    const topic = this.#topics.get(name);
    if (topic === undefined) return false;
    if (!this.#open) {
      this.#topics.delete(name);
      return false;
    }
    if (topic.state === "attaching" || topic.state === "attached") {
      this.#control.push(encode("detach", { topic: name }));
    }
    topic.state = "detaching";
    return true;
  }

  /** Take a message of the connection and say what it means. */
  receive(data, now) {
    let message;
    try {
      message = decode(data);
    } catch (error) {
      if (!(error instanceof CodecError)) throw error;
      return [broken(`the server broke the protocol: ${error.message}`)];
    }
    if (message.name === "auth_refused") return this.#authRefused(message);
    if (this.#authenticating && message.name !== "auth_ok") {
      return [broken("the server broke the protocol: it answers AUTH with another message")];
    }
    if (this.state === "connecting") {
      this.state = "connected";
      this.#attempts = 0;
    }
    switch (message.name) {
      case "auth_ok":
        return this.#authOk(message.valid_ms, now);
      case "payload":
        return this.#payload(message);
      case "ack":
        return this.#ack(message.sequence_number);
      case "pong":
        return this.#pong(message.timestamp, now);
      case "attached":
        return this.#attached(message);
      case "detached": {
        const events = this.#detached(message.topic);
        this.#readers.detached(message.topic);
        return events;
      }
      case "waiting":
      case "reading":
      case "records":
      case "stored":
      case "lost":
        return this.#readers.receive(message);
      default:
        return []; // a newer server may say more than we understand
    }
  }

  /**
   * Send the PING that is due, or give up; send again what was not acknowledged in time.
   * While the connection has not taken all it was given (`drained`), a publish may still be in
   * there, and a second one behind it would only make the wait longer.
   */
  tick(now, drained = true) {
    if (now >= this.#answerAt) {
      return [broken(this.#authenticating ? NO_TOKENS : "AUTH is unanswered")];
    }
    if (now >= this.#pingAt) {
      if (this.#ping !== null) {
        return [broken(`a ping was not answered within ${this.#options.pingIntervalMs} ms`)];
      }
      this.#sendPing(now);
    }
    if (now >= this.#againAt) {
      if (drained) this.#sendAgain(now);
      else this.#againAt = now + this.#options.resendMs;
    }
    return this.#readers.tick(now);
  }

  /** The messages that overtake publishes; they are few. */
  controlToSend(now) {
    if (this.#open) this.#readers.flush(now);
    const control = this.#control;
    this.#control = [];
    return control;
  }

  /** The next publish for the connection, or null when there is none or the window is full. */
  publishToSend(now) {
    if (!this.#open) return null;
    const publish = this.#nextAgain() ?? this.#nextFresh();
    if (publish === null) return null;
    publish.sentAt = now;
    this.#againAt = Math.min(this.#againAt, now + this.#options.resendMs);
    return publish.data;
  }

  #nextAgain() {
    while (this.#again.length > 0) {
      const publish = this.#again.shift();
      if (!publish.acknowledged) return publish;
    }
    return null;
  }

  #nextFresh() {
    const { windowMax, windowBytesMax } = this.#options;
    const sent = this.#sent;
    if (this.#refusals === REFUSALS_MAX - 1 && sent > 0) return null; // the oldest goes alone
    if (sent === this.#publishes.length || sent >= windowMax || this.#sentBytes >= windowBytesMax) {
      return null;
    }
    const publish = this.#publishes.at(sent);
    this.#sent += 1;
    this.#sentBytes += publish.data.length;
    return publish;
  }

  #sendAgain(now) {
    this.#againAt = Infinity;
    for (let n = 0; n < this.#sent; n += 1) {
      const publish = this.#publishes.at(n);
      const at = publish.sentAt + this.#options.resendMs;
      if (at <= now) {
        publish.sentAt = Infinity; // not before it has been sent
        this.#again.push(publish);
      } else {
        this.#againAt = Math.min(this.#againAt, at);
      }
    }
  }

  #sendPing(now) {
    this.#ping = { timestamp: Math.floor(now * 1000), at: now };
    this.#pingAt = now + this.#options.pingIntervalMs;
    this.#control.push(encode("ping", { timestamp: this.#ping.timestamp }));
  }

  #sendAttach(name, topic) {
    this.#control.push(encode("attach", { topic: name, serial: topic.serial ?? undefined }));
  }

  #payload({ topic: name, serial, message: payload }) {
    const topic = this.#topics.get(name);
    if (topic?.state !== "attached") return [];
    topic.serial = serial;
    return [{ kind: "message", topic: name, serial, payload }];
  }

  #ack(number) {
    const first = uint32(this.#nextNumber - this.#publishes.length);
    const count = uint32(number - first) + 1;
    if (count > 2 ** 31) return []; // the number lies before the first: an older ACK
    if (count > this.#sent) {
      return [broken(`the server acknowledged publish ${number}, which was never sent`)];
    }
    for (let n = 0; n < count; n += 1) this.#shift();
    this.#sent -= count;
    this.#refusals = 0;
    return [{ kind: "acknowledged", publishes: count }];
  }

  /** Forget the oldest publish. */
  #shift() {
    const publish = this.#publishes.shift();
    publish.acknowledged = true;
    this.#publishesBytes -= publish.data.length;
    this.#sentBytes -= publish.data.length;
  }

  #pong(timestamp, now) {
    if (this.#ping?.timestamp === timestamp) {
      this.latencyMs = now - this.#ping.at;
      this.#sureUntil = this.#ping.at + this.#options.pingIntervalMs;
      this.#ping = null;
      if (this.#isAsked) {
        this.#isAsked = false;
        return [{ kind: "answered" }];
      }
    }
    return [];
  }

  #attached({ topic: name, serial }) {
    const topic = this.#topics.get(name);
    if (topic?.state !== "attaching") return [];
    const asked = topic.serial;
    topic.state = "attached";
    topic.serial = serial;
    const events = [{ kind: "attached", topic: name, serial }];
    if (asked && asked !== serial) {
      events.push({ kind: "missed", topic: name, asked, got: serial });
    }
    return events;
  }

  #detached(name) {
    const topic = this.#topics.get(name);
    switch (topic?.state) {
      case undefined:
        return [];
      case "detaching":
        this.#topics.delete(name);
        return [{ kind: "detached", topic: name }];
      case "reattaching":
        topic.state = "attaching";
        this.#sendAttach(name, topic);
        return [];
      default:
        return [broken(`the server detached "${name}" unasked`)];
    }
  }
}

/**
 * The named readers of a client, over all its connections: what was received, handled and stored.
 *
 *     state      READ answered     LOST      reconnected  meaning
 *     idle       -                 -         claiming     there is no connection
 *     claiming   waiting, active   claiming  claiming     READ was sent
 *     waiting    active            claiming  claiming     another connection reads
 *     active     active (moved)    claiming  claiming     records come, and may be acknowledged
 *
 * Records are handled in any order, and the server is told of the prefix: the position up to which all
 * are. After a lost connection the server starts again at the cursor. When that is a place inside of
 * what was handled here, nobody else has gone on meanwhile: what the application has is still its own,
 * and only records that it does not have are delivered. Otherwise the reading starts anew.
 */
export class ReaderSessions {
  /** A server that knows readers answers READ at once: the others do not answer, or hang up. */
  static ANSWER_MS = 5000;
  /** Connections in a row that end with READ unanswered, until the server is taken not to know them. */
  static HANG_UPS_MAX = 3;
  static UNKNOWN =
    "the server does not know named readers: subscribe without a reader, or use Headrace";
  static REFUSED = 2;

  #instance;
  #send;
  #open = false;
  #readers = new Map();
  /** Topics for which READ is to be sent. */
  #unsent = new Set();
  /** Topics that wait for DETACHED before that. */
  #held = new Set();
  /** Topics whose prefix has grown. */
  #grown = new Set();

  /** `instance`: a random number, by which the server knows this client on another connection. */
  constructor(instance, send) {
    this.#instance = instance;
    this.#send = send;
  }

  get tickAt() {
    let at = Infinity;
    for (const { answerAt } of this.#readers.values()) at = Math.min(at, answerAt);
    return at;
  }

  read(topic, { reader, newest, window }, held) {
    this.#readers.set(topic, {
      ...{ reader, newest, window, state: "idle", answerAt: Infinity, hangUps: 0, answered: false, grant: 0 },
      /** Whether the application may have records that nobody else was given since. */
      wasActive: false,
      /** The last offset that the server was told of, and the last that it has confirmed. */
      ...{ sent: 0, stored: 0 },
      ...startingAt({ epoch: 0, offset: 0, ordinal: 0 }),
    });
    if (held && this.#open) this.#held.add(topic);
    else this.#claim(topic);
  }

  /** Returns whether there was one. What was handled is told before. */
  stop(topic) {
    this.#tellHandled();
    this.#unsent.delete(topic);
    this.#held.delete(topic);
    return this.#readers.delete(topic);
  }

  handled(topic, offset) {
    const one = this.#readers.get(topic);
    if (!one?.outstanding.delete(offset)) return false;
    while (one.order.length > 0 && !one.outstanding.has(one.order.at(0).offset)) {
      one.prefix = one.order.shift();
    }
    this.#grown.add(topic);
    return true;
  }

  handledUpTo(topic) {
    return this.#readers.get(topic)?.prefix.offset ?? 0;
  }

  isActive(topic) {
    return this.#readers.get(topic)?.state === "active";
  }

  opened(now) {
    this.#open = true;
    for (const [topic, one] of this.#readers) {
      if (one.hangUps < ReaderSessions.HANG_UPS_MAX) this.#claim(topic);
      else one.answerAt = now;
    }
  }

  disconnected() {
    for (const one of this.#readers.values()) {
      // A server that has answered once supports named readers, however often a connection is cut.
      if (this.#open && one.state === "claiming" && !one.answered) one.hangUps += 1;
      Object.assign(one, { state: "idle", grant: 0, answerAt: Infinity });
    }
    this.#open = false;
    this.#unsent.clear();
    this.#held.clear();
  }

  /** The server has let go of a topic: it may be read again. */
  detached(topic) {
    if (this.#held.delete(topic)) this.#claim(topic);
  }

  /** Give up readers that the server does not answer for. */
  tick(now) {
    const events = [];
    for (const [topic, one] of this.#readers) {
      if (now < one.answerAt) continue;
      // Should it know them and be slow, it must not think that we read.
      if (one.state === "claiming") this.#send("detach", { topic });
      this.stop(topic);
      events.push({ kind: "readerFailed", topic, reason: ReaderSessions.UNKNOWN });
    }
    return events;
  }

  /** Send what there is to say. */
  flush(now) {
    for (const topic of this.#unsent) {
      const one = this.#readers.get(topic);
      one.answerAt = now + ReaderSessions.ANSWER_MS;
      const { reader, newest, window } = one;
      const start = newest ? "newest" : "oldest";
      this.#send("read", { topic, reader, start, instance: this.#instance, window });
    }
    this.#unsent.clear();
    this.#tellHandled();
  }

  receive(message) {
    const { topic } = message;
    const one = this.#readers.get(topic);
    if (one === undefined || this.#held.has(topic)) return []; // of a reading that has ended
    one.hangUps = 0;
    one.answered = true;
    one.answerAt = Infinity;
    switch (message.name) {
      case "records":
        return one.state === "active" ? this.#records(one, message) : [];
      case "stored":
        if (message.grant !== one.grant) return [];
        one.stored = Math.max(one.stored, message.offset);
        return [{ kind: "stored", topic, offset: one.stored }];
      case "reading":
        return this.#reading(one, message);
      case "waiting":
        one.state = "waiting";
        if (message.ahead === 0) return [];
        return [
          ...this.#superseded(one, topic, "another client reads now"),
          { kind: "reader", topic, state: "waiting" },
        ];
      default:
        return this.#lost(one, message);
    }
  }

  #claim(topic) {
    if (!this.#open) return;
    Object.assign(this.#readers.get(topic), { state: "claiming", grant: 0 });
    this.#unsent.add(topic);
  }

  #tellHandled() {
    for (const topic of this.#grown) {
      const one = this.#readers.get(topic);
      // The server takes no more than it has sent itself, in the present grant.
      const { offset, ordinal } = one.prefix.offset < one.seen.offset ? one.prefix : one.seen;
      if (one.state === "active" && offset > one.sent) {
        one.sent = offset;
        this.#send("handled", { topic, grant: one.grant, offset, ordinal });
      }
    }
    this.#grown.clear();
  }

  #reading(one, { topic, grant, asked, exact, epoch, offset, ordinal }) {
    const at = { epoch, offset, ordinal };
    const isOurs =
      one.wasActive &&
      one.stored <= offset &&
      offset <= one.prefix.offset &&
      (epoch === one.received.epoch || offset === one.received.offset);
    const events = isOurs
      ? []
      : this.#superseded(one, topic, "the reader was moved, or another client read");
    if (!isOurs) Object.assign(one, startingAt(at));
    Object.assign(one, { state: "active", wasActive: true, grant, seen: at });
    one.stored = one.sent = offset;
    const serial = `${epoch}@${offset}`;
    events.push({ kind: "reader", topic, state: "active", serial });
    events.push({ kind: "stored", topic, offset });
    if (!exact) events.push({ kind: "missed", topic, asked: `@${asked}`, got: serial });
    return events;
  }

  #lost(one, { topic, code, reason }) {
    if (code === ReaderSessions.REFUSED) {
      this.stop(topic);
      return [{ kind: "readerFailed", topic, reason }];
    }
    const events = this.#superseded(one, topic, reason);
    this.#claim(topic);
    return events;
  }

  #superseded(one, topic, reason) {
    const { wasActive } = one;
    Object.assign(one, startingAt({ epoch: 0, offset: 0, ordinal: 0 }), { wasActive: false });
    return wasActive ? [{ kind: "reader", topic, state: "lost", reason }] : [];
  }

  #records(one, { topic, epoch, offset: begin, ordinal: first, time, records }) {
    if (begin < one.seen.offset) return [broken(`the server sent records of "${topic}" twice`)];
    const events = [];
    const expected = Math.max(one.seen.offset, one.received.offset);
    if (begin > expected) {
      const got = `${epoch}@${begin}`;
      events.push({ kind: "missed", topic, asked: `@${expected}`, got });
    }
    const messages = [];
    const view = new DataView(records.buffer, records.byteOffset, records.byteLength);
    let ordinal = first;
    for (let at = 0; at < records.length; ) {
      const payloadAt = at + RECORD_HEADER_BYTES;
      const end = payloadAt <= records.length ? payloadAt + view.getUint32(at) : Infinity;
      if (end > records.length) {
        return [broken(`the server sent a record of "${topic}" that is cut off`)];
      }
      const offset = begin + end;
      ordinal += 1;
      if (offset > one.received.offset) {
        one.received = { epoch, offset, ordinal };
        one.order.push(one.received);
        one.outstanding.add(offset);
        messages.push({ offset, payload: records.subarray(payloadAt, end) });
      }
      at = end;
    }
    one.seen = { epoch, offset: begin + records.length, ordinal };
    this.#grown.add(topic); // some may have been handled on an earlier connection
    if (messages.length > 0) {
      const before = ordinal - messages.length;
      events.push({ kind: "records", topic, epoch, ordinal: before, time, messages });
    }
    return events;
  }
}

/** The state of a reader whose application has been given nothing that counts. */
function startingAt(position) {
  return {
    /** Behind the last record that the application was given, and of the present grant. */
    received: position,
    seen: position,
    /** Up to here all is handled; behind it come the positions of the others, in order. */
    prefix: position,
    order: new Fifo(),
    /** The offsets of those that are not handled. */
    outstanding: new Set(),
  };
}

export function broken(reason) {
  return { kind: "broken", reason };
}

/** Sequence numbers count modulo 2³². */
function uint32(number) {
  return number >>> 0;
}

/** A message of the protocol is a map, `{"type": number, "name": {fields}}`. */
const MESSAGES = [
  { type: 1, name: "attach", required: ["topic"] },
  { type: 2, name: "attached", required: ["topic", "serial"] },
  { type: 3, name: "publish", required: ["topic", "message", "sequence_number"] },
  { type: 4, name: "ack", required: ["sequence_number"] },
  { type: 5, name: "payload", required: ["topic", "serial", "message"] },
  { type: 6, name: "ping", required: ["timestamp"] },
  { type: 7, name: "pong", required: ["timestamp"] },
  { type: 8, name: "detach", required: ["topic"] }, // 8 and 9 are our extension
  { type: 9, name: "detached", required: ["topic"] },
  // So are these, for named readers.
  { type: 64, name: "read", required: ["topic", "reader", "instance", "window"] },
  { type: 65, name: "waiting", required: ["topic", "ahead"] },
  {
    type: 66,
    name: "reading",
    required: ["topic", "grant", "asked", "exact", "epoch", "offset", "ordinal"],
  },
  {
    type: 67,
    name: "records",
    required: ["topic", "epoch", "offset", "ordinal", "time", "records"],
  },
  { type: 68, name: "handled", required: ["topic", "grant", "offset", "ordinal"] },
  { type: 69, name: "stored", required: ["topic", "grant", "offset"] },
  { type: 70, name: "lost", required: ["topic", "code", "reason"] },
  // And these, for tokens.
  { type: 80, name: "auth", required: ["token"] },
  { type: 81, name: "auth_ok", required: ["valid_ms"] },
  { type: 82, name: "auth_refused", required: ["code", "reason"] },
];
const BY_TYPE = new Map(MESSAGES.map((message) => [message.type, message]));
const BY_NAME = new Map(MESSAGES.map((message) => [message.name, message]));

/** How to read the fields; all others are passed over. */
const FIELDS = new Map([
  ["topic", (reader) => reader.text()],
  ["serial", (reader) => reader.text()],
  ["message", (reader) => reader.bytes()],
  ["sequence_number", (reader) => reader.uint(2 ** 32 - 1)],
  ["timestamp", (reader) => reader.number()],
  ...["reader", "start", "reason", "token"].map((name) => [name, (reader) => reader.text()]),
  ...["instance", "window", "ahead", "grant", "asked", "code"].map((name) => [name, natural]),
  ...["epoch", "offset", "ordinal", "time", "valid_ms"].map((name) => [name, natural]),
  ["exact", (reader) => reader.boolean()],
  ["records", (reader) => reader.bytes()],
]);

function natural(reader) {
  return reader.uint(Number.MAX_SAFE_INTEGER);
}

/** The peer sent what is not a message of this protocol. */
export class CodecError extends HeadraceError {
  static {
    this.prototype.name = "CodecError";
  }
}

/** The fields are text, bytes and unsigned integers; undefined ones are left out. */
export function encode(name, fields) {
  const present = Object.keys(fields).filter((field) => fields[field] !== undefined);
  const writer = new Writer(present.reduce((sum, field) => sum + sizeMax(fields[field]), 32));
  writer.map(2);
  writer.value("type");
  writer.value(BY_NAME.get(name).type);
  writer.value(name);
  writer.map(present.length);
  for (const field of present) {
    writer.value(field);
    writer.value(fields[field]);
  }
  return writer.finish();
}

/** What a field may take, its name included. */
function sizeMax(value) {
  if (typeof value === "number") return 32;
  // UTF-8 takes at most three bytes for each unit of a JavaScript string.
  return 32 + (typeof value === "string" ? 3 : 1) * value.length;
}

/** The message's name and fields; without a name when its type is unknown. */
export function decode(data) {
  if (typeof data === "string") throw new CodecError("a text message");
  const reader = new Reader(new Uint8Array(data));
  let type;
  // The type may come last, so bodies are passed over first; only the one that counts is read.
  const bodies = new Map();
  for (let left = reader.map(); left > 0; left -= 1) {
    const key = reader.key();
    if (key === "type") {
      type = reader.uint(2 ** 16 - 1);
    } else {
      bodies.set(key, reader.at);
      reader.skip();
    }
  }
  reader.finish();
  if (type === undefined) throw new CodecError("a message without type");
  const known = BY_TYPE.get(type);
  if (known === undefined) return {};
  if (!bodies.has(known.name)) throw new CodecError(`type ${type} without "${known.name}"`);
  reader.at = bodies.get(known.name);
  return readBody(reader, known);
}

function readBody(reader, { name, required }) {
  const message = { name };
  for (let left = reader.map(); left > 0; left -= 1) {
    const field = reader.key();
    const read = FIELDS.get(field);
    if (read === undefined || reader.isNil()) reader.skip();
    else message[field] = read(reader);
  }
  for (const field of required) {
    if (!(field in message)) throw new CodecError(`"${name}" without "${field}"`);
  }
  return message;
}

/** Writes MessagePack, each value in its shortest form. */
class Writer {
  #bytes;
  #view;
  #at = 0;

  constructor(bytesMax) {
    this.#bytes = new Uint8Array(bytesMax);
    this.#view = new DataView(this.#bytes.buffer);
  }

  /** Up to 15 pairs of key and value follow. */
  map(count) {
    this.#uint8(0x80 | count);
  }

  value(value) {
    if (typeof value === "number") this.#number(value);
    else if (typeof value === "string") this.#text(value);
    else this.#binary(value);
  }

  finish() {
    return this.#bytes.subarray(0, this.#at);
  }

  #number(number) {
    if (number < 2 ** 7) this.#uint8(number);
    else if (number < 2 ** 8) this.#headed8(0xcc, number);
    else if (number < 2 ** 16) this.#headed16(0xcd, number);
    else if (number < 2 ** 32) this.#headed32(0xce, number);
    else {
      this.#headed32(0xcf, number / 2 ** 32);
      this.#uint32(number % 2 ** 32);
    }
  }

  #text(text) {
    // Names are short and mostly ASCII: for those the general encoder takes ten times as long.
    const bytes = ASCII.test(text) ? null : utf8.encode(text);
    const length = bytes === null ? text.length : bytes.length;
    if (length < 2 ** 5) this.#uint8(0xa0 | length);
    else if (length < 2 ** 8) this.#headed8(0xd9, length);
    else if (length < 2 ** 16) this.#headed16(0xda, length);
    else this.#headed32(0xdb, length);
    if (bytes !== null) this.#append(bytes);
    else for (let n = 0; n < length; n += 1) this.#uint8(text.charCodeAt(n));
  }

  #binary(bytes) {
    if (bytes.length < 2 ** 8) this.#headed8(0xc4, bytes.length);
    else if (bytes.length < 2 ** 16) this.#headed16(0xc5, bytes.length);
    else this.#headed32(0xc6, bytes.length);
    this.#append(bytes);
  }

  #headed8(head, number) {
    this.#uint8(head);
    this.#uint8(number);
  }

  #headed16(head, number) {
    this.#uint8(head);
    this.#view.setUint16(this.#at, number);
    this.#at += 2;
  }

  #headed32(head, number) {
    this.#uint8(head);
    this.#uint32(number);
  }

  #uint8(number) {
    this.#view.setUint8(this.#at, number);
    this.#at += 1;
  }

  #uint32(number) {
    this.#view.setUint32(this.#at, number);
    this.#at += 4;
  }

  #append(bytes) {
    this.#bytes.set(bytes, this.#at);
    this.#at += bytes.length;
  }
}

/**
 * Reads MessagePack. Every length is compared with what is there before it is believed, and what
 * is passed over is counted, not descended into: no size and no nesting costs memory or stack.
 */
class Reader {
  at = 0;
  #bytes;
  #view;
  /** What `#head` found: a kind of value, and its number, or how many bytes or values it has. */
  #kind;
  #value;

  constructor(bytes) {
    this.#bytes = bytes;
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  /** How many pairs of key and value follow. */
  map() {
    this.#expect("map");
    return this.#value;
  }

  /** A key, or undefined for one that is no text: what it names is not ours. */
  key() {
    const at = this.at;
    this.#head();
    if (this.#kind === "text") return this.#text();
    this.at = at;
    this.skip();
    return undefined;
  }

  text() {
    this.#expect("text");
    return this.#text();
  }

  /** Bytes are `bin`; some encoders write them as text, or as an array of integers. */
  bytes() {
    this.#head();
    if (this.#kind === "bytes" || this.#kind === "text") return this.#take(this.#value);
    if (this.#kind !== "array") throw new CodecError(`${this.#kind} where bytes are due`);
    return Uint8Array.from({ length: this.#value }, () => this.uint(255));
  }

  uint(max) {
    const number = this.number();
    if (!Number.isInteger(number) || number < 0 || number > max) {
      throw new CodecError(`${number} where an integer from 0 to ${max} is due`);
    }
    return number;
  }

  /** Exact up to 2⁵³, as far as JavaScript's numbers are. */
  number() {
    this.#expect("number");
    return this.#value;
  }

  boolean() {
    const head = this.#bytes[this.at];
    this.#expect("boolean");
    return head === 0xc3;
  }

  isNil() {
    return this.#bytes[this.at] === 0xc0;
  }

  skip() {
    for (let left = 1; left > 0; left -= 1) {
      this.#head();
      if (this.#kind === "array") left += this.#value;
      else if (this.#kind === "map") left += 2 * this.#value;
      else if (this.#kind !== "number") this.#pass(this.#value);
    }
  }

  finish() {
    if (this.at !== this.#bytes.length) throw new CodecError("bytes behind the message");
  }

  #expect(kind) {
    this.#head();
    if (this.#kind !== kind) throw new CodecError(`${this.#kind} where ${kind} is due`);
  }

  #text() {
    const at = this.at;
    this.#pass(this.#value);
    return asciiText(this.#bytes, at, this.at) ?? this.#utf8Text(this.#bytes.subarray(at, this.at));
  }

  #utf8Text(bytes) {
    try {
      return strictUtf8.decode(bytes);
    } catch {
      throw new CodecError("text that is not UTF-8");
    }
  }

  #take(count) {
    const at = this.at;
    this.#pass(count);
    return this.#bytes.subarray(at, this.at);
  }

  #pass(count) {
    this.#mustHave(count);
    this.at += count;
  }

  /** Read a value up to where its bytes, or the values in it, begin. */
  #head() {
    const head = this.#bytes[this.at];
    this.#pass(1);
    if (head <= 0x7f) this.#found("number", head);
    else if (head <= 0x8f) this.#found("map", head & 0x0f);
    else if (head <= 0x9f) this.#found("array", head & 0x0f);
    else if (head <= 0xbf) this.#found("text", head & 0x1f);
    else if (head >= 0xe0) this.#found("number", head - 0x100);
    else {
      const { kind, size, read } = HEADS[head - 0xc0];
      this.#mustHave(size);
      this.#found(kind, read(this.#view, this.at));
      this.at += size;
    }
    // A value takes at least a byte.
    if (this.#kind === "array") this.#mustHave(this.#value);
    else if (this.#kind === "map") this.#mustHave(2 * this.#value);
    else if (this.#kind === "invalid") throw new CodecError("a byte that begins no value");
  }

  #found(kind, value) {
    this.#kind = kind;
    this.#value = value;
  }

  #mustHave(count) {
    const left = this.#bytes.length - this.at;
    if (count <= left) return;
    throw new CodecError(`${count} bytes or values announced, ${left} bytes left`);
  }
}

const UINT8 = { size: 1, read: (view, at) => view.getUint8(at) };
const UINT16 = { size: 2, read: (view, at) => view.getUint16(at) };
const UINT32 = { size: 4, read: (view, at) => view.getUint32(at) };
const UINT64 = { size: 8, read: (view, at) => low(view, at) + 2 ** 32 * view.getUint32(at) };
const INT8 = { size: 1, read: (view, at) => view.getInt8(at) };
const INT16 = { size: 2, read: (view, at) => view.getInt16(at) };
const INT32 = { size: 4, read: (view, at) => view.getInt32(at) };
const INT64 = { size: 8, read: (view, at) => low(view, at) + 2 ** 32 * view.getInt32(at) };
const FLOAT32 = { size: 4, read: (view, at) => view.getFloat32(at) };
const FLOAT64 = { size: 8, read: (view, at) => view.getFloat64(at) };

/** Of 64 bits: two halves are exact where JavaScript's numbers are, and need no BigInt. */
const low = (view, at) => view.getUint32(at + 4);
const fixed = (value) => ({ size: 0, read: () => value });
/** An extension has a byte for its type before its data. */
const withType = ({ size, read }) => ({ size, read: (view, at) => read(view, at) + 1 });

/** What begins with 0xc0 to 0xdf: the kind of value, and how its number or length is written. */
const HEADS = [
  ["nil", fixed(0)],
  ["invalid", fixed(0)],
  ["boolean", fixed(0)],
  ["boolean", fixed(0)],
  ...[UINT8, UINT16, UINT32].map((length) => ["bytes", length]),
  ...[UINT8, UINT16, UINT32].map((length) => ["extension", withType(length)]),
  ...[FLOAT32, FLOAT64].map((number) => ["number", number]),
  ...[UINT8, UINT16, UINT32, UINT64].map((number) => ["number", number]),
  ...[INT8, INT16, INT32, INT64].map((number) => ["number", number]),
  ...[1, 2, 4, 8, 16].map((length) => ["extension", withType(fixed(length))]),
  ...[UINT8, UINT16, UINT32].map((length) => ["text", length]),
  ...[UINT16, UINT32].map((count) => ["array", count]),
  ...[UINT16, UINT32].map((count) => ["map", count]),
].map(([kind, written]) => ({ kind, ...written }));

const ASCII = /^[\x00-\x7f]*$/;
export const LONE_SURROGATE = /\p{Surrogate}/u;
export const utf8 = new TextEncoder();
// `ignoreBOM` keeps a mark at the beginning: two topics must not become one.
const strictUtf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** Null for what is long or not ASCII: only then is the general decoder the faster one. */
function asciiText(bytes, from, to) {
  if (to - from > 32) return null;
  let text = "";
  for (let at = from; at < to; at += 1) {
    if (bytes[at] > 0x7f) return null;
    text += String.fromCharCode(bytes[at]);
  }
  return text;
}

/** A queue whose front is taken in constant time, however long it is. */
export class Fifo {
  #items = [];
  #first = 0;

  get length() {
    return this.#items.length - this.#first;
  }

  at(index) {
    return this.#items[this.#first + index];
  }

  push(item) {
    this.#items.push(item);
  }

  shift() {
    const item = this.#items[this.#first];
    this.#items[this.#first] = undefined;
    this.#first += 1;
    if (this.#first * 2 > this.#items.length) {
      this.#items = this.#items.slice(this.#first);
      this.#first = 0;
    }
    return item;
  }
}

const TRANSPORTS = { ws: "ws", wss: "wss", wombat: "ws", wombats: "wss" };

export function websocketUrl(text, path) {
  const [, scheme, rest] = /^(wss?|wombats?):\/\/(.+)$/.exec(text) ?? [];
  const address = `${TRANSPORTS[scheme]}://${rest}`;
  if (scheme === undefined || !URL.canParse(address)) {
    throw new ConfigError(`a URL is ws://HOST:PORT or wss://HOST:PORT, not "${text}"`);
  }
  const url = new URL(address);
  if (url.pathname === "/") url.pathname = path;
  // Asked of the text: a URL object drops the port that is its transport's default.
  const hasPort = /^[^/?#]*:\d+(?![^/?#])/.test(rest);
  if (scheme === "wombat" && !hasPort) url.port = DEFAULT_PORT;
  url.hash = ""; // no WebSocket takes one
  return url.href;
}

export function checkOptions({ WebSocket = globalThis.WebSocket, ...options }, defaults) {
  const given = Object.entries(options).filter(([, value]) => value !== undefined);
  for (const [name, value] of given) {
    if (!Object.hasOwn(defaults, name)) throw new TypeError(`there is no option "${name}"`);
    const least = name === "jitter" || name === "flushTimeoutMs" ? 0 : 1;
    const most = name === "jitter" ? 1 : OPTION_MAX;
    if (typeof value !== "number" || !(value >= least && value <= most)) {
      throw new ConfigError(`${name} must be a number from ${least} to ${most}, not ${value}`);
    }
  }
  if (typeof WebSocket !== "function") {
    throw new ConfigError(
      "there is no WebSocket here: use Node 22 or newer, start Node 20 with " +
        "--experimental-websocket, or pass one (from the package ws, say) as the option WebSocket",
    );
  }
  return { ...defaults, ...Object.fromEntries(given), WebSocket };
}

/** Refuse a token that nobody could take, or that others could read on its way. */
export function checkCredentials(target, { token, ticket, insecureToken }) {
  mustBe("boolean", insecureToken, "insecureToken");
  for (const [what, given] of Object.entries({ token, ticket })) {
    if (given === undefined || typeof given === "function") continue;
    const fault = faultOf(given);
    if (fault !== "") throw new ConfigError(`the ${what} is ${fault}`);
  }
  if (token === undefined && ticket === undefined) return;
  const { protocol, hostname } = new URL(target);
  const isLocal = /^(localhost|.*\.localhost|127\.\d+\.\d+\.\d+|\[::1\])$/.test(hostname);
  if (protocol === "wss:" || isLocal || insecureToken) return;
  throw new ConfigError(
    `the token is not sent to ${hostname} without TLS, because others could read it: use wss://, or ` +
      "allow it with insecureToken: true",
  );
}

/** The serial that a subscription asks for; null asks for nothing older than now. */
function startOf({ serial, offset, from, ...others }) {
  const unknown = Object.keys(others)[0];
  if (unknown !== undefined) throw new TypeError(`there is no option "${unknown}"`);
  if ([serial, offset, from].filter((given) => given !== undefined).length > 1) {
    throw new TypeError("give one of serial, offset and from");
  }
  if (serial !== undefined && serial !== null) {
    mustBe("string", serial, "a serial");
    return serial;
  }
  if (offset !== undefined) {
    if (typeof offset !== "bigint" && !Number.isSafeInteger(offset)) {
      throw new TypeError(`an offset is an integer, not ${offset}`);
    }
    if (offset < 0) throw new RangeError(`an offset is not below 0, as ${offset} is`);
    return `@${offset}`;
  }
  if (from !== undefined && from !== "start" && from !== "now") {
    throw new TypeError(`from is "start" or "now", not "${from}"`);
  }
  return from === "start" ? "@0" : null;
}

/** What a named reader asks for. */
function readerOf({ reader, start = "oldest", ack = "auto", ...others }) {
  const unknown = Object.keys(others)[0];
  if (unknown !== undefined) {
    throw new TypeError(`there is no option "${unknown}" of a reader: it starts where it stopped`);
  }
  mustBe("string", reader, "a reader's name");
  const size = utf8.encode(reader).length;
  if (size === 0 || size > READER_BYTES_MAX || LONE_SURROGATE.test(reader)) {
    throw new RangeError(
      `a reader's name has 1 to ${READER_BYTES_MAX} bytes of UTF-8, this one has ${size}`,
    );
  }
  if (start !== "oldest" && start !== "newest") {
    throw new TypeError(`start is "oldest" or "newest", not "${start}"`);
  }
  if (ack !== "auto" && ack !== "manual") {
    throw new TypeError(`ack is "auto" or "manual", not "${ack}"`);
  }
  return { reader, start, ack };
}

export function checkTopic(topic) {
  mustBe("string", topic, "a topic");
  if (topic === "") throw new BadTopicNameError("a topic name must not be empty");
  if (LONE_SURROGATE.test(topic)) {
    throw new BadTopicNameError("a topic name must be well-formed Unicode");
  }
  if (3 * topic.length <= TOPIC_BYTES_MAX) return; // without looking at each character
  const size = utf8.encode(topic).length;
  const most = topic.startsWith(RESERVED_PREFIX) ? RESERVED_TOPIC_BYTES_MAX : TOPIC_BYTES_MAX;
  if (size > most) {
    throw new BadTopicNameError(
      `a topic name may have ${most} bytes of UTF-8, this one has ${size}`,
    );
  }
}

function bytesOf(payload) {
  if (typeof payload === "string") return utf8.encode(payload);
  if (ArrayBuffer.isView(payload)) {
    return new Uint8Array(payload.buffer, payload.byteOffset, payload.byteLength);
  }
  if (payload instanceof ArrayBuffer) return new Uint8Array(payload);
  throw new TypeError(`a payload is bytes or text, not ${typeof payload}`);
}

export function mustBe(type, value, what) {
  if (typeof value !== type) throw new TypeError(`${what} is a ${type}, not ${typeof value}`);
}

/** What an application's handler threw is not mixed with the client's own errors. */
export function report(error) {
  if (typeof globalThis.reportError === "function") globalThis.reportError(error);
  else console.error(error);
}
