/**
 * Channels of Headrace for browsers and Node: a processor joins a channel, sends messages to it and
 * gets those of the others, over as many connections as it takes. No dependencies.
 *
 * The protocol is in channel_session.js; the WebSocket and its timers are the Link of headrace.js.
 * The manual of the API is channel.d.ts.
 */

import {
  ClientClosedError,
  ConfigError,
  ConnectTimeoutError,
  Fifo,
  Handlers,
  LONE_SURROGATE,
  Link,
  LocalProtocolError,
  PAYLOAD_BYTES_MAX,
  UnacknowledgedError,
  Waiting,
  checkCredentials,
  checkOptions,
  checkTopic,
  mustBe,
  report,
  utf8,
  websocketUrl,
} from "./headrace.js";
import { ChannelSession, DEFAULTS, contentOf } from "./channel_session.js";

export { ChannelError } from "./channel_session.js";

const PATH = "/v1/channels";
const TOPIC_PREFIX = "$channel/";
const PROCESSOR_BYTES_MAX = 255;
const STATE_BYTES_MAX = 1024 * 1024;
const LEASE_MS_MIN = 1000;
const LEASE_MS_MAX = 365 * 24 * 3600 * 1000;
const WAYS = ["push", "signal", "poll"];

export function joinChannel(url, options = {}) {
  const { processor, token, receive = "push", restore, handle, ...rest } = options;
  const { from, leaseMs, leaveOnPagehide = false, ...more } = rest;
  const { ticket, insecureToken = false, ...others } = more;
  const { name, target } = parseUrl(url);
  checkProcessor(processor);
  if (!WAYS.includes(receive)) {
    throw new ConfigError(`receive is "push", "signal" or "poll", not "${receive}"`);
  }
  if (restore !== undefined) mustBe("function", restore, "restore");
  if (handle !== undefined) mustBe("function", handle, "handle");
  if (from !== undefined && from !== "state") {
    throw new ConfigError(`from is "state" or nothing, not "${from}"`);
  }
  const isLease = Number.isFinite(leaseMs) && leaseMs >= LEASE_MS_MIN && leaseMs <= LEASE_MS_MAX;
  if (leaseMs !== undefined && !isLease) {
    throw new ConfigError(`leaseMs is ${LEASE_MS_MIN} to ${LEASE_MS_MAX}, not ${leaseMs}`);
  }
  mustBe("boolean", leaveOnPagehide, "leaveOnPagehide");
  // A token of a server's own kind may be any JSON value, which is sent as it is.
  const isText = typeof token === "string" || typeof token === "function";
  const shown = isText ? { token, ticket } : { ticket };
  checkCredentials(target, { ...shown, insecureToken });
  const checked = { ...checkOptions(others, DEFAULTS), ...shown };
  const who = { channel: name, processor, token: isText ? undefined : token, receive, from, leaseMs };
  return new Channel(url, target, who, { restore, handle, leaveOnPagehide }, checked);
}

class Channel {
  /** Why it ended, other than by `close` and `leave`. */
  error = null;
  #options;
  #callbacks;
  #session;
  #link;
  #handlers = new Handlers("state", "missed");
  #waiting = new Waiting(() => {
    if (this.state !== "closed") return null;
    return this.error ?? new ClientClosedError("the channel is closed");
  });
  /** How to settle the promise of everything that was asked of the session. */
  #asked = new Map();
  #asks = 0;
  /** Messages, and what is to be restored before them, that nobody has taken. */
  #items = new Fifo();
  #taking = Promise.resolve();
  /** What was taken and may be acknowledged. What was taken before a snapshot may not. */
  #taken = new WeakSet();
  /** The last message that a loop was given. */
  #given = null;
  #left = false;

  constructor(url, target, who, callbacks, options) {
    this.url = url;
    this.name = who.channel;
    this.processor = who.processor;
    this.#options = options;
    this.#callbacks = callbacks;
    const instance = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
    this.#session = new ChannelSession({ ...options, ...who, instance });
    this.#link = new Link(this.#session, target, options, {
      changed: (state) => this.#stateChanged(state),
      happened: (event) => this.#happened(event),
    });
    if (callbacks.handle) this.#callForEach(callbacks.handle);
    if (callbacks.leaveOnPagehide) {
      globalThis.addEventListener?.("pagehide", this.#hide);
      globalThis.addEventListener?.("pageshow", this.#show);
    }
  }

  /** The page is closed, loaded again or put aside, and may never hear of it otherwise. */
  #hide = () => {
    if (this.state === "closed") return;
    this.#link.send(); // what was sent goes before it
    this.#session.hide();
    this.#link.suspend();
  };

  /** The browser has kept the page, and shows it again. */
  #show = ({ persisted }) => {
    if (persisted && this.state !== "closed") this.#link.resume();
  };

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
      throw new ConnectTimeoutError(
        `channel "${this.name}" was not joined at ${this.url} within ${timeoutMs} ms: ` +
          (this.lastError || "no answer"),
      );
    }
  }

  // Not `async`, nor are the next two: that would wrap the promise, and the wrapper would count as
  // unhandled.
  send(content) {
    return this.#ask(() => this.#session.send(contentOf(content, PAYLOAD_BYTES_MAX)));
  }

  snapshot() {
    return this.#ask(() => this.#session.snapshot());
  }

  upload(state, offset) {
    return this.#ask(() => {
      if (!Number.isSafeInteger(offset) || offset < 0) {
        throw new TypeError(`an offset is an integer from 0, not ${offset}`);
      }
      return this.#session.upload(offset, contentOf(state, STATE_BYTES_MAX));
    });
  }

  async window() {
    await this.#waiting.until(() => this.#session.hasRoom);
  }

  async flush() {
    const last = this.#asks;
    await this.#waiting.until(() => {
      const { value: first } = this.#asked.values().next();
      return first === undefined || first.ask > last;
    });
  }

  ack(message) {
    if (!this.#taken.has(message) || this.state === "closed") return;
    const isMessage = message instanceof ChannelMessage;
    this.#session.handled(isMessage ? message.nextOffset : message.offset);
    this.#link.send();
  }

  on(name, handler) {
    return this.#handlers.on(name, handler);
  }

  next() {
    if (this.#callbacks.handle) {
      const text = `the messages of channel "${this.name}" go to its handler`;
      return Promise.reject(new LocalProtocolError(text));
    }
    // Whoever asks for the next message is done with the last one.
    if (this.#given !== null) this.ack(this.#given);
    this.#given = null;
    const taken = this.#taking.then(async () => {
      const value = await this.#take();
      this.#given = value ?? null;
      return { value, done: value === undefined };
    });
    this.#taking = taken.catch(() => {});
    return taken;
  }

  // No `return`: leaving a loop keeps the channel, and the next loop goes on with it.
  [Symbol.asyncIterator]() {
    return this;
  }

  async leave({ timeoutMs = this.#options.flushTimeoutMs } = {}) {
    const until = performance.now() + timeoutMs;
    let unacknowledged = 0;
    try {
      if (await this.#flushed(timeoutMs)) {
        this.#session.leave();
        this.#link.send();
        await this.#waiting.until(() => this.#left, Math.max(0, until - performance.now()));
      } else {
        unacknowledged = this.unacknowledged;
      }
    } finally {
      await this.#stop();
    }
    if (unacknowledged > 0) throw new UnacknowledgedError(unacknowledged, "sends");
    if (!this.#left) {
      throw new ConnectTimeoutError(
        `channel "${this.name}" was not left within ${timeoutMs} ms: ` +
          (this.lastError || "no answer"),
      );
    }
  }

  async close({ flushMs = this.#options.flushTimeoutMs } = {}) {
    let unacknowledged = 0;
    if (flushMs > 0 && this.state !== "closed") {
      const flushed = await this.#flushed(flushMs).catch(() => true); // it has ended meanwhile
      if (!flushed) unacknowledged = this.unacknowledged;
    }
    await this.#stop();
    if (unacknowledged > 0) throw new UnacknowledgedError(unacknowledged, "sends");
  }

  #flushed(timeoutMs) {
    return this.#waiting.until(() => this.#session.isFlushed, timeoutMs);
  }

  #ask(ask) {
    let asked;
    try {
      this.#mustBeOpen();
      asked = ask();
    } catch (error) {
      return Promise.reject(error);
    }
    this.#asks += 1;
    const settlers = { ask: this.#asks };
    const promise = new Promise((resolve, reject) => Object.assign(settlers, { resolve, reject }));
    this.#asked.set(asked, { ...settlers, promise });
    this.#link.send();
    return promise;
  }

  async #callForEach(handle) {
    try {
      for (let message; (message = await this.#take()) !== undefined;) {
        await handle(message);
        this.ack(message);
      }
    } catch (error) {
      // To go on would be to lose the message: the next acknowledgement counts for it too.
      this.#end(error);
      report(error);
    }
  }

  /** The next message, or undefined at the end. What it builds upon is restored first. */
  async #take() {
    for (;;) {
      try {
        while (this.#items.length === 0) await this.#filled();
      } catch {
        if (this.error !== null) throw this.error;
        return undefined;
      }
      const item = this.#items.shift();
      this.#taken.add(item);
      if (item instanceof ChannelMessage) return item;
      await this.#restore(item);
    }
  }

  #filled() {
    this.#session.want(performance.now());
    this.#link.send();
    return this.#waiting.until(() => this.#items.length > 0);
  }

  async #restore(item) {
    const { snapshot, missed } = item;
    if (missed !== null) this.#handlers.tell("missed", missed);
    if (snapshot !== null) {
      try {
        await this.#callbacks.restore?.({ ...snapshot, missed });
      } catch (error) {
        this.#end(error); // or a state would be acknowledged that the application does not have
        throw error;
      }
    }
    this.ack(item);
  }

  #happened(event) {
    switch (event.kind) {
      case "message":
        this.#items.push(new ChannelMessage(event));
        break;
      case "restore":
        // It has everything that was not taken, or will be followed by it.
        this.#items = new Fifo();
        this.#taken = new WeakSet();
        this.#items.push(event);
        break;
      case "lost":
        this.#items.push({ snapshot: null, missed: event.missed, offset: 0 });
        break;
      case "answered":
        this.#settle(event.asked).resolve(event.answer);
        break;
      case "refused":
        this.#settle(event.asked).reject(event.error);
        break;
      case "left":
        this.#left = true;
        break;
      case "ended":
        this.#end(event.error);
        break;
    }
    this.#waiting.wake();
  }

  #settle(asked) {
    const settlers = this.#asked.get(asked);
    this.#asked.delete(asked);
    return settlers;
  }

  #stateChanged(state) {
    this.#waiting.wake();
    this.#handlers.tell("state", state);
  }

  /** End without having been asked to. */
  #end(error) {
    if (this.state === "closed") return;
    this.error = error;
    this.#stop();
  }

  async #stop() {
    globalThis.removeEventListener?.("pagehide", this.#hide);
    globalThis.removeEventListener?.("pageshow", this.#show);
    if (this.state !== "closed") {
      this.#session.close();
      this.#items = new Fifo();
      this.#stateChanged("closed"); // those who wait look at what is not answered yet
      const error = this.error ?? new ClientClosedError("the channel is closed");
      for (const { promise, reject } of this.#asked.values()) {
        promise.catch(() => {}); // told by `close`, or as the reason why the channel ended
        reject(error);
      }
      this.#asked.clear();
    }
    await this.#link.stop();
  }

  #mustBeOpen() {
    if (this.state !== "closed") return;
    throw this.error ?? new ClientClosedError("the channel is closed");
  }
}

class ChannelMessage {
  constructor({ offset, processor, number, ms, payload, bytes }) {
    this.nextOffset = offset;
    this.processor = processor;
    this.number = number;
    this.ms = ms;
    this.payload = payload;
    this.bytes = bytes;
  }
}

/** The channel that a URL names, and where its WebSocket goes. */
function parseUrl(text) {
  const [, scheme, host, path] = /^(channels?):\/\/([^/?#]+)\/([^?#]+)$/.exec(text) ?? [];
  try {
    if (scheme === undefined) throw new ConfigError("it has another form");
    const name = decodeURIComponent(path);
    checkTopic(TOPIC_PREFIX + name);
    // Both are the same listener, with the same ports.
    return { name, target: websocketUrl(`${scheme.replace("channel", "wombat")}://${host}`, PATH) };
  } catch (error) {
    throw new ConfigError(
      "a URL is channel://HOST:PORT/NAME or channels://HOST:PORT/NAME, where NAME is " +
        `percent-encoded, not "${text}": ${error.message}`,
    );
  }
}

function checkProcessor(name) {
  if (typeof name !== "string") {
    throw new ConfigError(
      "processor must be a name: under it the server remembers, over connections and restarts, " +
        "what this client has sent and acknowledged. Choose one that no other has, and keep it",
    );
  }
  const size = utf8.encode(name).length;
  if (size < 1 || size > PROCESSOR_BYTES_MAX) {
    throw new ConfigError(
      `a processor's name has 1 to ${PROCESSOR_BYTES_MAX} bytes of UTF-8, this one has ${size}`,
    );
  }
  if (LONE_SURROGATE.test(name) || /\p{Control}/u.test(name)) {
    throw new ConfigError("a processor's name is well-formed Unicode without control characters");
  }
}
