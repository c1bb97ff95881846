/**
 * A processor in a channel, without I/O: what it says, and what it makes of the answers. Messages
 * and time are arguments. Below it the codec: JSON, with bytes in base64.
 *
 * For channel.js and for tests only.
 */

import {
  CodecError,
  Fifo,
  HeadraceError,
  PayloadTooLargeError,
  broken,
  utf8,
} from "./headrace.js";

export const DEFAULTS = {
  windowMax: 4096,
  windowBytesMax: 16 * 1024 * 1024,
  pingIntervalMs: 5000,
  pollIntervalMs: 1000,
  retryMs: 1000,
  attemptTimeoutMs: 5000,
  flushTimeoutMs: 5000,
  jitter: 0,
};

/** The server has refused something; `code` is its word for why. */
export class ChannelError extends HeadraceError {
  static {
    this.prototype.name = "ChannelError";
  }

  constructor(code, text) {
    super(text);
    this.code = code;
  }
}

/**
 * The protocol of channels for one processor in one channel over all its connections, without I/O,
 * promises or clocks. Times are milliseconds of one monotonic clock.
 *
 *     disconnected ──▶ connecting ──JOINED──▶ connected ──▶ disconnected     any ──close──▶ closed
 *
 * What the server must know is kept here as state, never as bytes in flight: the messages that are
 * not accepted, the requests that are not answered, and how far the application has come. A new
 * connection says HELLO and JOIN, and from JOINED on all of that goes on.
 *
 * **Sending.** A message gets its number when it is sent. Sends that are under way are a run of
 * numbers, and the server answers each. When one is refused, those behind it are too ("gap"): then
 * nothing more is sent until all are answered, and what remains is numbered and sent anew, in
 * order. So a number never stands for two messages that are under way. JOINED says which number was
 * accepted last: what was sent before and lies at or below it is accepted, all else goes again.
 *
 * **Receiving.** Offsets never go back, so a message that comes again is known by its offset, and
 * given to the application once. It is acknowledged when the application is done with it and this
 * connection has brought it. Only one ACK is under way; the next is for all done meanwhile.
 * A snapshot begins a new count: nothing that was done before it counts behind it. With `from`, a
 * connection asks for what lies behind the last message it has, whatever was acknowledged.
 */
export class ChannelSession {
  state = "disconnected";
  latencyMs = null;
  #options;
  #open = false;
  #attempts = 0;
  #connections = 0;
  #leaving = false;
  #control = [];
  #pingAt = Infinity;
  #pingedAt = null;
  /** Whether nothing was heard since HELLO or the last PING. */
  #silent = false;

  /** Messages that are not under way, in order; those under way, by number. */
  #queue = new Fifo();
  #underWay = new Map();
  #underWayBytes = 0;
  #unacknowledgedBytes = 0;
  #accepted = 0;
  /** While those under way are waited for because one was refused: what else is known of them. */
  #settling = null;
  #sendAt = -Infinity;

  /** Requests that are not answered; the first is under way while there is a connection. */
  #requests = new Fifo();
  #requestAt = Infinity;

  /** Offsets: given to the application, and done by it. */
  #received = -1;
  #handled = -1;
  /** Offsets of this connection: what it has brought, what of that is done, and acknowledged. */
  #brought = -1;
  #done = -1;
  #acked = -1;
  #acking = false;
  /** For those who fetch: whether the application waits, an answer is due, and when to ask. */
  #wanted = false;
  #fetching = false;
  #fetchAt = Infinity;

  constructor({ random = Math.random, receive = "push", ...options }) {
    this.#options = { ...DEFAULTS, random, receive, ...options };
  }

  get unacknowledged() {
    return this.#queue.length + this.#underWay.size + (this.#settling?.again.length ?? 0);
  }

  get hasRoom() {
    const { windowMax, windowBytesMax } = this.#options;
    return this.unacknowledged < windowMax && this.#unacknowledgedBytes < windowBytesMax;
  }

  /** Whether everything sent is accepted, and what is done acknowledged as far as it can be now. */
  get isFlushed() {
    return this.unacknowledged === 0 && !this.#acking && this.#done <= this.#acked;
  }

  /** The token of this connection, if the application gives a text or a function. */
  token = undefined;

  /** When `tick` is next due. */
  get tickAt() {
    const fetchAt = this.#wanted && !this.#fetching ? this.#fetchAt : Infinity;
    const sendAt = this.#sendAt === -Infinity ? Infinity : this.#sendAt;
    return Math.min(this.#pingAt, this.#requestAt, fetchAt, sendAt);
  }

  connecting() {
    this.state = "connecting";
  }

  /** A fresh connection stands. */
  opened(now) {
    const { processor, receive, instance } = this.#options;
    const token = this.token ?? this.#options.token;
    this.#open = true;
    this.#silent = true;
    this.#pingAt = now + this.#options.pingIntervalMs;
    this.#connections += 1;
    // So that late words of a dead connection do no harm.
    const attempt = instance && this.#connections;
    this.#control.push(JSON.stringify({ type: "hello", processor, token, instance, attempt }));
    if (this.#leaving) this.#say("leave");
    else this.#say("join", { receive, ...this.#origin(), ...this.#lease() });
  }

  /** The attempt failed or the connection ended. Returns how long to wait before the next one. */
  disconnected() {
    this.state = "disconnected";
    this.#open = false;
    this.#control = [];
    this.#pingAt = Infinity;
    this.#pingedAt = null;
    this.#requestAt = Infinity;
    this.#fetching = false;
    this.#fetchAt = Infinity;
    this.#brought = this.#done = this.#acked = -1;
    this.#acking = false;
    this.#queueAgain([...(this.#settling?.again ?? []), ...this.#underWay.values()]);
    const { jitter, random } = this.#options;
    const waitMs = 100 * Math.min(2 ** this.#attempts, 100) * (1 - jitter * random());
    this.#attempts += 1;
    return waitMs;
  }

  /** The application is done; nothing follows. */
  close() {
    this.state = "closed";
  }

  /** Take a message, also without a connection. Returns what its answer will be known by. */
  send(content) {
    const message = { content, number: 0, mayBeStored: false };
    this.#queue.push(message);
    this.#unacknowledgedBytes += content.length;
    return message;
  }

  /** Ask for the last known state. */
  snapshot() {
    return this.#request({ type: "snapshot", fields: {}, content: "" });
  }

  /** Give the state that the messages up to an offset make. */
  upload(offset, content) {
    return this.#request({ type: "upload", fields: { offset }, content });
  }

  /** The page goes: say so on this connection. Another one, if there will be any, joins again. */
  hide() {
    if (this.state !== "connected" || this.#leaving) return;
    // With nothing under way, no number has to be remembered for this page.
    this.#say("leave", this.unacknowledged === 0 ? { forget: true } : {});
  }

  /** Be a member no more. */
  leave() {
    this.#leaving = true;
    if (this.state === "connected") this.#say("leave");
  }

  /** The application is done with everything up to an offset. */
  handled(offset) {
    this.#handled = Math.max(this.#handled, offset);
    if (offset <= this.#brought) this.#done = Math.max(this.#done, offset);
    this.#sendAck();
  }

  /** The application has nothing left to do. */
  want(now) {
    this.#wanted = true;
    this.#fetch(now);
  }

  /** Take a message of the connection and say what it means. */
  receive(data, now) {
    let message;
    try {
      message = decodeMessage(data);
    } catch (error) {
      if (!(error instanceof CodecError)) throw error;
      return [broken(`the server broke the protocol: ${error.message}`)];
    }
    this.#silent = false;
    const { channel = this.#options.channel } = message;
    if (channel !== this.#options.channel) return [];
    if (message.type === "error") return this.#error(message, now);
    if (message.type === "joined") return this.#joined(message, now);
    if (message.type === "left") return this.#left(message);
    if (message.type === "pong") return this.#pong(now);
    if (this.state !== "connected") return [];
    switch (message.type) {
      case "sent":
        return this.#sent(message, now);
      case "messages":
        return this.#messages(message, now);
      case "signal":
        this.#fetchAt = now;
        this.#fetch(now);
        return [];
      case "acked":
        return this.#ackAnswered();
      case "uploaded":
        return this.#answered("upload", message.offset);
      case "snapshot":
        return this.#answered("snapshot", message.snapshot);
      default:
        return []; // a newer server may say more than we understand
    }
  }

  /** Send the PING that is due, or give up; do what had to wait. */
  tick(now) {
    if (now >= this.#pingAt) {
      const { pingIntervalMs } = this.#options;
      if (this.#silent) return [broken(`nothing was heard for ${pingIntervalMs} ms`)];
      this.#control.push(JSON.stringify({ type: "ping" }));
      this.#silent = true;
      this.#pingedAt = now;
      this.#pingAt = now + pingIntervalMs;
    }
    if (now >= this.#requestAt) this.#sendRequest();
    if (now >= this.#sendAt) this.#sendAt = -Infinity;
    this.#fetch(now);
    return [];
  }

  /** The messages that overtake those of the application; they are few. */
  controlToSend() {
    const control = this.#control;
    this.#control = [];
    return control;
  }

  /** The next message of the application, or null when there is none or it has to wait. */
  publishToSend(now) {
    const { windowMax, windowBytesMax, channel } = this.#options;
    const mayGo = this.state === "connected" && this.#settling === null && now >= this.#sendAt;
    const isFull = this.#underWay.size >= windowMax || this.#underWayBytes >= windowBytesMax;
    if (!mayGo || isFull || this.#queue.length === 0) return null;
    const message = this.#queue.shift();
    message.number = this.#accepted + this.#underWay.size + 1;
    message.mayBeStored = true;
    this.#underWay.set(message.number, message);
    this.#underWayBytes += message.content.length;
    return encodeMessage("send", { channel, number: message.number }, message.content);
  }

  #say(type, fields = {}, content = "") {
    const { channel } = this.#options;
    this.#control.push(encodeMessage(type, { channel, ...fields }, content));
  }

  /** With a state, every connection goes on behind what came last; the first one has nothing yet. */
  #origin() {
    if (this.#options.from === undefined) return {};
    return { from: this.#received >= 0 ? this.#received : this.#options.from };
  }

  #lease() {
    const { leaseMs } = this.#options;
    return leaseMs === undefined ? {} : { lease_s: leaseMs / 1000 };
  }

  #joined({ cursor, end, number, snapshot = null, missed = null }, now) {
    if (this.state === "connected") return [];
    this.state = "connected";
    this.#attempts = 0;
    if (this.#leaving) {
      this.#say("leave");
      return [];
    }
    const events = this.#acceptedUpTo(number);
    this.#brought = cursor;
    // A log that ends before what it has brought is another one, under the same name.
    const isAnother = end < this.#received;
    if (isAnother) missed ??= { messages: null, reason: "lost" };
    if (snapshot !== null || missed !== null) {
      this.#received = cursor;
      this.#handled = -1;
      events.push({ kind: "restore", snapshot, missed, offset: cursor });
    } else if (this.#options.from === undefined) {
      this.#done = this.#acked = cursor;
    } else {
      // It goes on where we asked for, and the server's cursor may be behind that.
      this.#done = Math.min(this.#handled, cursor);
      this.#sendAck();
    }
    this.#sendRequest();
    if (this.#options.receive === "poll") this.#fetchAt = now;
    this.#fetch(now);
    return events;
  }

  #acceptedUpTo(number) {
    const events = [];
    this.#accepted = number;
    while (this.#queue.length > 0) {
      const message = this.#queue.at(0);
      if (!message.mayBeStored || message.number > number) break;
      this.#queue.shift();
      this.#unacknowledgedBytes -= message.content.length;
      events.push(answered(message, null));
    }
    return events;
  }

  #sent({ number, offset = null }, now) {
    const message = this.#underWay.get(number);
    if (message === undefined) return [broken(`the server accepted ${number}, which was not sent`)];
    this.#notUnderWay(message);
    this.#accepted += 1;
    this.#unacknowledgedBytes -= message.content.length;
    return [answered(message, offset), ...this.#settle(now)];
  }

  #sendRefused({ number, code, text, retry }, now) {
    const message = this.#underWay.get(number);
    if (message === undefined) return [broken(`the server refused ${number}: ${text}`)];
    this.#notUnderWay(message);
    this.#settling ??= { again: [], isExplained: false, waits: false };
    const events = [];
    if (retry) {
      message.mayBeStored = false;
      this.#settling.again.push(message);
      if (code !== "gap") this.#settling.waits = true;
    } else {
      this.#settling.isExplained = true;
      this.#unacknowledgedBytes -= message.content.length;
      events.push(refused(message, code, text));
    }
    return [...events, ...this.#settle(now)];
  }

  #notUnderWay(message) {
    this.#underWay.delete(message.number);
    this.#underWayBytes -= message.content.length;
  }

  #settle(now) {
    if (this.#settling === null || this.#underWay.size > 0) return [];
    const { again, isExplained, waits } = this.#settling;
    this.#queueAgain(again);
    if (waits) this.#sendAt = now + this.#options.retryMs;
    // Somebody else counts for this processor too: JOINED will say how far that has come.
    else if (!isExplained) return [broken("the server expects another number")];
    return [];
  }

  /** What was under way goes before what was not. */
  #queueAgain(messages) {
    const queue = new Fifo();
    for (const message of messages.sort((a, b) => a.number - b.number)) queue.push(message);
    while (this.#queue.length > 0) queue.push(this.#queue.shift());
    this.#queue = queue;
    this.#underWay.clear();
    this.#underWayBytes = 0;
    this.#settling = null;
    this.#sendAt = -Infinity;
  }

  #messages({ messages, more, lost = 0 }, now) {
    if (this.#options.receive !== "push") {
      this.#fetching = false;
      if (more) this.#fetchAt = now;
      else if (this.#options.receive === "poll") {
        this.#fetchAt = now + this.#options.pollIntervalMs;
      }
    }
    const events = [];
    if (lost > 0) events.push({ kind: "lost", missed: { messages: lost, reason: "lost" } });
    for (const message of messages) {
      const { offset } = message;
      this.#brought = Math.max(this.#brought, offset);
      if (offset > this.#received) {
        this.#received = offset;
        this.#wanted = false;
        events.push({ kind: "message", ...message });
      } else if (offset <= this.#handled) {
        this.#done = Math.max(this.#done, offset);
      }
    }
    this.#sendAck();
    this.#fetch(now);
    return events;
  }

  #sendAck() {
    if (this.state !== "connected" || this.#acking || this.#done <= this.#acked) return;
    this.#acking = true;
    this.#acked = this.#done;
    this.#say("ack", { offset: this.#acked });
  }

  #ackAnswered() {
    this.#acking = false;
    this.#sendAck();
    return [{ kind: "acked" }];
  }

  #fetch(now) {
    const mayAsk = this.state === "connected" && this.#wanted && !this.#fetching;
    if (!mayAsk || now < this.#fetchAt) return;
    this.#fetching = true;
    this.#fetchAt = Infinity;
    if (this.#done > this.#acked) this.#say("fetch", { ack: (this.#acked = this.#done) });
    else this.#say("fetch");
  }

  #request(request) {
    this.#requests.push(request);
    if (this.#requests.length === 1) this.#sendRequest();
    return request;
  }

  #sendRequest() {
    this.#requestAt = Infinity;
    if (this.state !== "connected" || this.#requests.length === 0) return;
    const { type, fields, content } = this.#requests.at(0);
    this.#say(type, fields, content);
  }

  #answered(type, answer) {
    if (this.#requests.at(0)?.type !== type) return [];
    const events = [answered(this.#requests.shift(), answer)];
    this.#sendRequest();
    return events;
  }

  #left({ reason }) {
    // Also when it was done elsewhere.
    if (reason !== "replaced" && this.#leaving) return [{ kind: "left" }];
    const { processor } = this.#options;
    const texts = {
      replaced: `another connection of "${processor}" has joined the channel`,
      destroyed: "an operator has destroyed the channel",
    };
    const text =
      texts[reason] ?? `"${processor}" has left the channel, over HTTP or on another connection`;
    return [{ kind: "ended", error: new ChannelError(reason ?? "left", text) }];
  }

  #error(error, now) {
    const { of, code, text, retry } = error;
    if (code === "not-joined") return [broken(text)]; // the next connection joins
    switch (of) {
      case "send":
        return this.#sendRefused(error, now);
      case "ack":
        // Whatever is acknowledged later counts for this too.
        return this.#ackAnswered();
      case "fetch":
        this.#fetching = false;
        this.#fetchAt = now + this.#options.retryMs;
        return [];
      case "snapshot":
      case "upload": {
        if (this.#requests.at(0)?.type !== of) return [];
        if (retry) {
          this.#requestAt = now + this.#options.retryMs;
          return [];
        }
        const request = this.#requests.shift();
        this.#sendRequest();
        return [refused(request, code, text)];
      }
      default:
        // Of HELLO, JOIN and LEAVE, or of the connection: it would be the same on the next one.
        if (retry) return [broken(text)];
        return [{ kind: "ended", error: new ChannelError(code, text) }];
    }
  }

  #pong(now) {
    if (this.#pingedAt !== null) this.latencyMs = now - this.#pingedAt;
    this.#pingedAt = null;
    return [];
  }
}

function answered(asked, answer) {
  return { kind: "answered", asked, answer };
}

function refused(asked, code, text) {
  return { kind: "refused", asked, error: new ChannelError(code, text) };
}

/** A message is an object in JSON; its content, if it has one, is JSON already. */
export function encodeMessage(type, fields, content = "") {
  const head = JSON.stringify({ type, ...fields });
  return content === "" ? head : `${head.slice(0, -1)},${content}}`;
}

const integer = Number.isSafeInteger;
const text = (value) => typeof value === "string";

/** What a message must have, for us to do something with it. */
const FIELDS = {
  joined: { end: integer, cursor: integer, number: integer },
  sent: { number: integer },
  messages: { messages: Array.isArray },
  uploaded: { offset: integer },
  snapshot: { snapshot: (value) => typeof value === "object" },
  error: { code: text, text },
};
const MESSAGE_FIELDS = { offset: integer, processor: text, number: integer };

/** A message of the server, with its contents decoded. */
export function decodeMessage(data) {
  if (typeof data !== "string") throw new CodecError("a binary message");
  let message;
  try {
    message = JSON.parse(data);
  } catch (error) {
    throw new CodecError(`no JSON: ${error.message}`);
  }
  if (!text(message?.type)) throw new CodecError("a message without type");
  if (Object.hasOwn(FIELDS, message.type)) mustHave(message, message.type, FIELDS[message.type]);
  if (message.type === "messages") {
    for (const one of message.messages) {
      mustHave(one, "a message", MESSAGE_FIELDS);
      decodeContent(one);
    }
  }
  if (message.snapshot) {
    mustHave(message.snapshot, "a snapshot", { offset: integer });
    decodeContent(message.snapshot);
  }
  return message;
}

function mustHave(message, what, fields) {
  for (const [field, isSound] of Object.entries(fields)) {
    if (!isSound(message?.[field])) throw new CodecError(`${what} without "${field}"`);
  }
}

function decodeContent(message) {
  if ("payload" in message) return;
  if (!text(message.bytes)) throw new CodecError("neither payload nor bytes");
  try {
    message.bytes = Uint8Array.from(atob(message.bytes), (one) => one.charCodeAt(0));
  } catch {
    throw new CodecError("bytes that are not base64");
  }
}

/** What JSON.stringify makes of half a surrogate pair; a backslash that is escaped begins none. */
const HALF_PAIR = /[^\\](?:\\\\)*\\ud[89a-f]/;

/** Bytes, or else any value that JSON has, as a field of a message. */
export function contentOf(value, bytesMax) {
  const bytes = bytesIn(value);
  if (bytes !== null) {
    mustFit(bytes.length, bytesMax);
    return `"bytes":"${base64(bytes)}"`;
  }
  const json = JSON.stringify(value);
  if (json === undefined) throw new TypeError(`${typeof value} is neither JSON nor bytes`);
  // The server would take the whole frame for none of ours, and all that is under way with it.
  if (HALF_PAIR.test(json)) throw new TypeError("a string has one half of a surrogate pair");
  // UTF-8 takes at least one and at most three bytes for each unit of a JavaScript string.
  mustFit(3 * json.length <= bytesMax ? 0 : utf8.encode(json).length, bytesMax);
  return `"payload":${json}`;
}

function bytesIn(value) {
  if (ArrayBuffer.isView(value)) {
    return new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
  }
  return value instanceof ArrayBuffer ? new Uint8Array(value) : null;
}

function mustFit(size, bytesMax) {
  if (size <= bytesMax) return;
  throw new PayloadTooLargeError(`a content may have ${bytesMax} bytes, this one has ${size}`);
}

/** In pieces: a function takes only so many arguments. */
function base64(bytes) {
  let binary = "";
  for (let at = 0; at < bytes.length; at += 8192) {
    binary += String.fromCharCode(...bytes.subarray(at, at + 8192));
  }
  return btoa(binary);
}
