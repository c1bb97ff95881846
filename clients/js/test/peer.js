// A server for tests, of Wombat or another protocol, which does only what it is told, and so can
// misbehave in every way.
// It knows as much of WebSocket (RFC 6455) as is needed to talk to a sound client.

import { createHash } from "node:crypto";
import { once } from "node:events";
import { createServer } from "node:http";

import { decode, encode } from "../headrace.js";

const WAIT_MS = 30_000;
const TEXT = 1;
const BINARY = 2;
const CLOSE = 8;

/** Start a peer that is closed at the end of the test `t`. */
export async function listen(t, options = {}) {
  const peer = new Peer(options);
  await peer.listen(options.port ?? 0);
  t.after(() => peer.close());
  return peer;
}

class Peer {
  #server = createServer();
  #connections = new Queue("a connection");
  #sockets = new Set();

  constructor({ pongs = true, upgrades = true, codec = { decode, encode } }) {
    this.pongs = pongs;
    this.codec = codec;
    this.#server.on("connection", (socket) => {
      this.#sockets.add(socket);
      socket.on("error", () => {}); // clients are cut off here on purpose
      socket.on("close", () => this.#sockets.delete(socket));
    });
    this.#server.on("upgrade", (request, socket) => {
      if (upgrades) this.#connections.push(new Connection(this, request, socket));
    });
  }

  get port() {
    return this.#server.address().port;
  }

  get url() {
    return `ws://127.0.0.1:${this.port}`;
  }

  async listen(port) {
    this.#server.listen(port, "127.0.0.1");
    await once(this.#server, "listening");
  }

  /** The next connection that a client makes. */
  accept() {
    return this.#connections.shift();
  }

  close() {
    this.#server.close();
    for (const socket of this.#sockets) socket.destroy();
  }
}

class Connection {
  #socket;
  #data = Buffer.alloc(0);
  #messages = new Queue("a message");
  #closed;

  constructor(peer, request, socket) {
    this.path = request.url;
    this.peer = peer;
    this.#socket = socket;
    // Not `once` of Node, which fails when the client was faster.
    this.#closed = new Promise((resolve) => socket.once("close", resolve));
    const key = request.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    const accept = createHash("sha1").update(key).digest("base64");
    socket.write(
      "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" +
        `Sec-WebSocket-Accept: ${accept}\r\n\r\n`,
    );
    socket.on("data", (data) => this.#received(data));
  }

  /** The next message, which must be of this name, unless it is a PING: those are answered. */
  async expect(name) {
    const message = await this.#messages.shift();
    if (message.name !== name) throw new Error(`${name} expected, ${JSON.stringify(message)} came`);
    return message;
  }

  /** The number of messages that came and were not looked at. */
  get waiting() {
    return this.#messages.length;
  }

  send(name, fields) {
    this.sendRaw(this.peer.codec.encode(name, fields));
  }

  /** ATTACH is expected and answered, from the serial asked for or the one given. */
  async attach(topic, serial) {
    const { topic: wanted, serial: asked } = await this.expect("attach");
    if (wanted !== topic) throw new Error(`${topic} expected, ${wanted} came`);
    this.send("attached", { topic, serial: serial ?? asked });
    return asked;
  }

  sendRaw(data) {
    this.#frame(typeof data === "string" ? TEXT : BINARY, Buffer.from(data));
  }

  /** Close as a server does, with "CODE REASON" or without. */
  close(why) {
    const [, code, reason] = /^(\d+) (.*)$/.exec(why) ?? [];
    const payload = Buffer.from(code === undefined ? "" : `  ${reason}`);
    if (code !== undefined) payload.writeUInt16BE(Number(code));
    this.#frame(CLOSE, payload);
  }

  destroy() {
    this.#socket.destroy();
  }

  /** Read nothing more, so that the client's bytes stay with it. */
  pause() {
    this.#socket.pause();
  }

  resume() {
    this.#socket.resume();
  }

  async closed() {
    await within(this.#closed, "the end of the connection");
  }

  #frame(opcode, payload) {
    const head =
      payload.length < 126
        ? Buffer.from([0x80 | opcode, payload.length])
        : Buffer.from([0x80 | opcode, 127, 0, 0, 0, 0, 0, 0, 0, 0]);
    if (head.length > 2) head.writeUInt32BE(payload.length, 6);
    this.#socket.write(Buffer.concat([head, payload]));
  }

  #received(data) {
    this.#data = Buffer.concat([this.#data, data]);
    for (let frame; (frame = this.#nextFrame());) this.#take(frame);
  }

  #nextFrame() {
    const data = this.#data;
    let at = 2;
    if (data.length < at) return null;
    let size = data[1] & 0x7f;
    if (size === 126) [size, at] = data.length < 4 ? [Infinity, at] : [data.readUInt16BE(2), 4];
    if (size === 127) [size, at] = data.length < 10 ? [Infinity, at] : [data.readUInt32BE(6), 10];
    if (data.length < at + 4 + size) return null;
    const mask = data.subarray(at, at + 4);
    const payload = Buffer.from(data.subarray(at + 4, at + 4 + size));
    for (let n = 0; n < payload.length; n += 1) payload[n] ^= mask[n & 3];
    this.#data = data.subarray(at + 4 + size);
    return { opcode: data[0] & 0x0f, payload };
  }

  #take({ opcode, payload }) {
    if (opcode === CLOSE) {
      this.#frame(CLOSE, payload);
      this.#socket.end();
      return;
    }
    const message = this.peer.codec.decode(payload);
    if (message.name !== "ping") this.#messages.push(message);
    else if (this.peer.pongs) this.send("pong", { timestamp: message.timestamp });
  }
}

class Queue {
  #items = [];
  #waiting = [];
  #what;

  constructor(what) {
    this.#what = what;
  }

  get length() {
    return this.#items.length;
  }

  push(item) {
    if (this.#waiting.length > 0) this.#waiting.shift()(item);
    else this.#items.push(item);
  }

  shift() {
    if (this.#items.length > 0) return Promise.resolve(this.#items.shift());
    return within(new Promise((resolve) => this.#waiting.push(resolve)), this.#what);
  }
}

/** The promise, or an error that says what was waited for in vain. */
export function within(promise, what) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`waited ${WAIT_MS} ms for ${what}`)), WAIT_MS);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
