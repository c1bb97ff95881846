// Clients of @logux/client, driven by lines of JSON: what to do on standard input, what happened on standard output.
import readline from "node:readline";
import WebSocket from "ws";

// As in browsers, where a connection that fails is closed and nothing is thrown.
globalThis.WebSocket = class extends WebSocket {
  constructor(url) {
    super(url);
    this.on("error", () => {});
  }
};

const { Client } = await import("@logux/client");
const { MemoryStore } = await import("@logux/core");

const clients = {};

// As in browsers: the clients answer messages whose connection has gone meanwhile, and live on.
process.on("unhandledRejection", (error) => console.error(error));

function report(client, fact) {
  process.stdout.write(JSON.stringify({ client, ...fact }) + "\n");
}

function own(action) {
  return !action.type.startsWith("logux/");
}

// Sent when the promise of an action is settled.
function follow(client, action, promise) {
  promise.then(
    () => report(client, { processed: action }),
    (error) => report(client, { undone: action, reason: error.action?.reason ?? String(error) }),
  );
}

const actions = {
  make({ client, url, userId, token, subprotocol, protocol, ping, timeout }) {
    const made = new Client({
      server: url,
      userId: userId ?? client,
      subprotocol: subprotocol ?? 10,
      token,
      store: new MemoryStore(),
      minDelay: 50,
      maxDelay: 200,
      ...(ping ? { ping, timeout } : {}),
    });
    if (protocol) made.node.localProtocol = protocol;
    made.node.catch((error) => report(client, { error: error.type, options: error.options }));
    made.on("state", () => report(client, { state: made.state }));
    made.node.connection.connection.on("message", (message) => report(client, { message }));
    made.log.on("add", (action, meta) => {
      if (own(action)) report(client, { event: action, id: meta.id, time: meta.time, channels: meta.channels });
    });
    clients[client] = made;
  },
  connect({ client }) {
    clients[client].node.connection.connect();
  },
  // Done when the socket is closed: the client takes the end of an old socket for that of the next.
  disconnect({ client }) {
    const connection = clients[client].node.connection;
    connection.connection.ws.addEventListener("close", () => report(client, { closed: true }));
    connection.disconnect();
  },
  // The connection is gone, as when a cable is pulled: it will be tried again.
  cut({ client }) {
    clients[client].node.connection.connection.ws.terminate();
  },
  // From now on, what the server says is not heard.
  deafen({ client }) {
    clients[client].node.connection.connection.ws.onmessage = () => {};
  },
  sync({ client, events, meta }) {
    for (const event of events) follow(client, event, clients[client].sync(event, { ...meta }));
  },
  facts({ client }) {
    const { node, nodeId, clientId, last, subscriptions } = clients[client];
    const { connection, lastSent, lastReceived, timeFix } = node;
    const reconnecting = connection.reconnecting;
    report(client, { facts: { nodeId, clientId, last, subscriptions, lastSent, lastReceived, timeFix, reconnecting } });
  },
};

readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const order = JSON.parse(line);
  actions[order.do](order);
});
