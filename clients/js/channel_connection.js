/**
 * One WebSocket for many channels. Each channel is given a part of it, which looks like a WebSocket
 * of its own: what channels do is in channel.js and does not know the difference.
 *
 * The first part opens the WebSocket, and all get its messages: those that name a channel go to its
 * part, all others to every part. A part that finds the server silent ends the WebSocket for all, and
 * the next attempt of any of them opens another one.
 */

import { joinChannel } from "./channel.js";
import { ClientClosedError, LocalProtocolError } from "./headrace.js";

const NORMAL = 1000;
const BROKEN = 1006;
/** Channels that ask for a ticket within this time, for the same WebSocket, get the same one. */
const TICKET_SHARED_MS = 5000;

/** Make a connection for a processor at `channel://HOST:PORT`. Nothing happens before the first `join`. */
export function connectChannels(url, options = {}) {
  return new ChannelConnection(url, options);
}

class ChannelConnection {
  #options;
  #trunk;
  #channels = new Map();
  #closed = false;

  constructor(url, { WebSocket = globalThis.WebSocket, ...options }) {
    this.url = url.replace(/\/$/, "");
    this.processor = options.processor;
    this.#options = options;
    const trunk = new Trunk(WebSocket);
    this.#trunk = trunk;
    const { ticket } = options;
    if (typeof ticket === "function") this.#options.ticket = () => trunk.ticket(ticket);
    const OwnPart = class extends Part {
      constructor(target) {
        super(trunk, target);
      }
    };
    // Without a WebSocket `join` says what to do.
    this.#options.WebSocket = typeof WebSocket === "function" ? OwnPart : WebSocket;
  }

  join(name, options = {}) {
    if (this.#closed) throw new ClientClosedError("the connection is closed");
    for (const own of ["processor", "token", "ticket", "insecureToken", "WebSocket"]) {
      if (Object.hasOwn(options, own)) {
        throw new LocalProtocolError(`${own} is an option of the connection, not of a channel`);
      }
    }
    if ((this.#channels.get(name)?.state ?? "closed") !== "closed") {
      throw new LocalProtocolError(`channel "${name}" is already joined on this connection`);
    }
    const url = `${this.url}/${encodeURIComponent(name)}`;
    const channel = joinChannel(url, { ...this.#options, ...options });
    this.#trunk.leases.set(name, options.leaseMs ?? this.#options.leaseMs);
    this.#channels.set(name, channel);
    return channel;
  }

  /** Close every channel, as `channel.close` does, and with the last one the WebSocket. */
  async close(options) {
    this.#closed = true;
    const ends = [...this.#channels.values()].map((channel) => channel.close(options));
    const failed = (await Promise.allSettled(ends)).find(({ status }) => status === "rejected");
    if (failed !== undefined) throw failed.reason;
  }
}

/** The WebSocket, as often as one is opened, and the parts of the present one. */
class Trunk {
  /** The lease that each channel has chosen: leaving its part must not change it. */
  leases = new Map();
  #WebSocket;
  #socket = null;
  #isOpen = false;
  #parts = new Set();
  /** By channel, those that have sent something for it. */
  #byChannel = new Map();
  /** How many answers are due to what was said when a channel was closed. */
  #parting = new Map();
  #welcome = null;
  #isGreeted = false;
  #isPinged = false;
  /** The server knows by these which connection of this client is the last. */
  #instance = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
  #attempts = 0;
  /** The promise of the ticket that opens the WebSocket, and when it was asked for. */
  #ticket = null;
  #ticketAskedAt = 0;

  constructor(WebSocket) {
    this.#WebSocket = WebSocket;
  }

  /** The ticket of the one WebSocket. Only the first channel that opens it needs one, but all ask. */
  ticket(give) {
    const now = performance.now();
    const isOld = this.#socket === null && now - this.#ticketAskedAt > TICKET_SHARED_MS;
    if (this.#ticket === null || isOld) {
      this.#ticketAskedAt = now;
      const given = Promise.resolve().then(give);
      this.#ticket = given;
      given.catch(() => {
        if (this.#ticket === given) this.#ticket = null;
      });
    }
    return this.#ticket;
  }

  get bufferedAmount() {
    return this.#socket?.bufferedAmount ?? 0;
  }

  add(part, url) {
    if (this.#socket === null) this.#dial(url);
    this.#parts.add(part);
    if (this.#isOpen) queueMicrotask(() => this.#parts.has(part) && part.tell("open"));
  }

  send(part, text) {
    if (!this.#isOpen || !this.#parts.has(part)) return;
    const { type, channel, ...fields } = JSON.parse(text);
    if (type === "hello") this.#greet(part, fields);
    else if (type === "ping") this.#ping();
    else {
      this.#byChannel.set(channel, part);
      part.channel = channel;
      if (type === "leave") part.hasLeft = true;
      if (type === "join") part.hasLeft = false;
      this.#socket.send(text);
    }
  }

  /** The channel is closed: nothing more is to come for it, and the others stay. */
  remove(part) {
    if (!this.#parts.delete(part)) return;
    const { channel } = part;
    if (this.#byChannel.get(channel) === part) this.#byChannel.delete(channel);
    if (this.#parts.size === 0) this.#end(NORMAL, "");
    else if (this.#isOpen && channel !== undefined && !part.hasLeft) {
      const leaseMs = this.leases.get(channel);
      const lease_s = leaseMs === undefined ? undefined : leaseMs / 1000;
      this.#parting.set(channel, (this.#parting.get(channel) ?? 0) + 1);
      this.#socket.send(JSON.stringify({ type: "join", channel, receive: "poll", lease_s }));
    }
    queueMicrotask(() => part.tell("close", { code: NORMAL, reason: "" }));
  }

  /** The server is silent: that goes for all. */
  drop(part) {
    if (!this.#parts.delete(part)) return;
    this.#end(BROKEN, "the server was silent on another channel");
  }

  #dial(url) {
    const socket = new this.#WebSocket(url);
    this.#socket = socket;
    this.#isOpen = this.#isGreeted = this.#isPinged = false;
    this.#welcome = null;
    const listen = (name, listener) => {
      socket.addEventListener(name, (event) => {
        if (socket === this.#socket) listener(event);
      });
    };
    listen("open", () => {
      this.#isOpen = true;
      this.#tellAll("open");
    });
    listen("message", ({ data }) => this.#received(data));
    listen("error", ({ message }) => {
      const parts = [...this.#parts];
      if (!this.#isOpen) this.#forget(); // Node 20 lets no "close" follow
      for (const part of parts) part.tell("error", { message });
    });
    listen("close", ({ code, reason }) => this.#end(code, reason));
  }

  #greet(part, fields) {
    if (this.#welcome !== null) {
      const data = this.#welcome;
      queueMicrotask(() => this.#parts.has(part) && part.tell("message", { data }));
    } else if (!this.#isGreeted) {
      this.#isGreeted = true;
      this.#attempts += 1;
      const own = { instance: this.#instance, attempt: this.#attempts };
      this.#socket.send(JSON.stringify({ type: "hello", ...fields, ...own }));
    }
  }

  #ping() {
    if (this.#isPinged) return;
    this.#isPinged = true;
    this.#socket.send(JSON.stringify({ type: "ping" }));
  }

  #received(data) {
    const { type, channel, of } = read(data);
    if (type === "welcome") this.#welcome = data;
    if (type === "pong") this.#isPinged = false;
    if (channel === undefined) this.#tellAll("message", { data });
    else if (!this.#isParting(channel, type === "joined" || of === "join")) {
      this.#byChannel.get(channel)?.tell("message", { data });
    }
  }

  /** Whether a message belongs to the time before a channel was closed. */
  #isParting(channel, isAnswer) {
    const answers = this.#parting.get(channel) ?? 0;
    if (isAnswer) this.#parting.set(channel, Math.max(0, answers - 1));
    return answers > 0;
  }

  #end(code, reason) {
    const socket = this.#socket;
    const parts = [...this.#parts];
    this.#forget();
    socket?.close(NORMAL);
    for (const part of parts) part.tell("close", { code, reason });
  }

  #forget() {
    this.#socket = null;
    this.#ticket = null;
    this.#isOpen = false;
    this.#parts.clear();
    this.#byChannel.clear();
    this.#parting.clear();
  }

  #tellAll(name, fields) {
    for (const part of [...this.#parts]) part.tell(name, fields);
  }
}

/** What a channel takes for its WebSocket. */
class Part extends EventTarget {
  binaryType = "arraybuffer";
  channel = undefined;
  hasLeft = false;
  #trunk;

  constructor(trunk, url) {
    super();
    this.#trunk = trunk;
    trunk.add(this, url);
  }

  get bufferedAmount() {
    return this.#trunk.bufferedAmount;
  }

  send(text) {
    this.#trunk.send(this, text);
  }

  close() {
    this.#trunk.remove(this);
  }

  /** What a client does to a server that it does not hear. */
  terminate() {
    this.#trunk.drop(this);
  }

  tell(name, fields = {}) {
    this.dispatchEvent(Object.assign(new Event(name), fields));
  }
}

/** What a message says; nothing for one that makes no sense, which the channels hear of. */
function read(data) {
  try {
    return JSON.parse(data) ?? {};
  } catch {
    return {};
  }
}
