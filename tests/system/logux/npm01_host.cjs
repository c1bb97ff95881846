// Clients of the npm packages 0.1, driven by lines of JSON: what to do on standard input, what happened on standard output.
const readline = require("node:readline");
const WebSocket = require("ws");

global.window = global;
// As in browsers, where a connection that fails is closed and nothing is thrown.
window.WebSocket = class extends WebSocket {
  constructor(url) {
    super(url);
    this.on("error", () => {});
  }
};

const BrowserConnection = require("logux-sync/browser-connection");
const ClientSync = require("logux-sync/client-sync");
const Reconnect = require("logux-sync/reconnect");
const MemoryStore = require("logux-core/memory-store");
const Log = require("logux-core/log");

const clients = {};

// As in browsers: the clients answer messages whose connection has gone meanwhile, and live on.
process.on("unhandledRejection", (error) => console.error(error));

function report(client, fact) {
  process.stdout.write(JSON.stringify({ client, ...fact }) + "\n");
}

const actions = {
  make({ client, url, credentials, subprotocol, protocol, ping, timeout, fixTime }) {
    // The counter never starts again, unlike that of `logux-core/create-timer`: with a wrong clock, a client moves the
    // last event of a message of n events by n corrections, and drops it if that is the time of an event that it has.
    let made = 0;
    const timer = () => [Date.now() + (clients[client]?.fast ?? 0), client, made++];
    const log = new Log({ store: new MemoryStore(), timer });
    log.keep(() => true);
    const connection = new Reconnect(new BrowserConnection(url), { minDelay: 50, maxDelay: 200 });
    const options = { credentials, subprotocol, fixTime: fixTime ?? true };
    if (ping) Object.assign(options, { ping, timeout });
    const sync = new ClientSync(client, log, connection, options);
    if (protocol) sync.protocol = protocol;
    sync.catch((error) => report(client, { error: error.type, options: error.options }));
    sync.on("state", () => report(client, { state: sync.state }));
    connection.connection.on("message", (message) => report(client, { message }));
    log.on("event", (event, meta) => report(client, { event, created: meta.created }));
    clients[client] = { log, sync, connection };
  },
  connect({ client }) {
    clients[client].connection.connect();
  },
  // Done when the socket is closed: the client takes the end of an old socket for that of the next.
  disconnect({ client }) {
    const connection = clients[client].connection;
    connection.connection.ws.addEventListener("close", () => report(client, { closed: true }));
    connection.disconnect();
  },
  // The same as soon as it has so many events and has said so.
  disconnectAfter({ client, count }) {
    clients[client].log.on("event", () => {
      count -= 1;
      if (count !== 0) return;
      setImmediate(() => setImmediate(() => actions.disconnect({ client })));
    });
  },
  // From now on, the client's clock is fast by so many milliseconds.
  setClock({ client, fast }) {
    clients[client].fast = fast;
  },
  // The connection is gone, as when a cable is pulled: it will be tried again.
  cut({ client }) {
    clients[client].connection.connection.ws.terminate();
  },
  // From now on, what the server says is not heard.
  deafen({ client }) {
    clients[client].connection.connection.ws.onmessage = () => {};
  },
  add({ client, events }) {
    for (const event of events) clients[client].log.add(event);
  },
  send({ client, message }) {
    clients[client].connection.send(message);
  },
  facts({ client }) {
    const { log, sync, connection } = clients[client];
    const { synced, otherSynced } = sync;
    const facts = { synced, otherSynced, added: log.lastAdded, reconnecting: connection.reconnecting };
    report(client, { facts });
  },
};

readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const order = JSON.parse(line);
  actions[order.do](order);
});
