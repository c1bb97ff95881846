// Pages that connect with tickets, which their application's own server gives them at /ticket. Each scenario
// is given the clients, the server's URL and `report(name, facts)`, as in scenarios.mjs.

async function ticket() {
  const answer = await fetch("/ticket");
  if (!answer.ok) throw new Error(`the application has no ticket: ${answer.status}`);
  return answer.text();
}

/**
 * Publish and receive over every protocol. Told that half is done, the test kills the server and starts it
 * again; the clients come back with other tickets.
 */
export async function ticketsOfAllProtocols({ connect, connectChannels, joinChannel, url, report }) {
  const client = connect(url, { ticket });
  const subscription = client.subscribe("rooms/a", { from: "start" });
  const channels = url.replace("wombat:", "channel:");
  const sender = joinChannel(`${channels}/a`, { processor: "sender", ticket });
  const shared = connectChannels(channels, { processor: "receiver", ticket });
  const receivers = [shared.join("a"), shared.join("b")];
  await Promise.all(receivers.map((one) => one.connected()));
  const received = [];
  const gone = new Promise((resolve) => {
    client.on("state", (state) => state === "disconnected" && resolve());
  });
  for (const text of ["one", "two"]) {
    await client.publish("rooms/a", text);
    await sender.send(text);
    const next = await Promise.all([subscription.next(), receivers[0].next()]);
    received.push(next[0].value.text(), next[1].value.payload);
    if (text === "one") await Promise.all([gone, report("half", {})]);
  }
  await shared.close();
  await sender.close();
  await client.close();

  const other = connect(url, { ticket });
  const refused = await other.publish("other", "x").catch((error) => `${error.name}: ${error.message}`);
  report("done", { received, refused, state: other.state, logux: await logux(url) });
}

/** Add an action to a Logux log, over the bare protocol, and return the types of the server's answers. */
async function logux(url) {
  const address = new URL("/v1/logux/notes", url.replace("wombat:", "ws:"));
  address.searchParams.set("ticket", await ticket());
  const socket = new WebSocket(address);
  const answers = [];
  await new Promise((resolve) => {
    socket.onclose = resolve;
    socket.onopen = () => socket.send(JSON.stringify(["connect", 5, "anna:page:tab", 0]));
    socket.onmessage = ({ data }) => {
      const [type, ...fields] = JSON.parse(data);
      answers.push(type === "sync" ? fields[1].type : type);
      if (type === "connected") {
        const action = [{ type: "note", channel: "c" }, { id: 0, time: 0 }];
        socket.send(JSON.stringify(["sync", 1, ...action]));
      }
      if (type === "sync") socket.close();
    };
  });
  return answers;
}

/** What a page sees of one ticket that it shows several times, over each protocol. */
export async function oneTicket({ connect, joinChannel, url, report }) {
  const given = await ticket();
  const options = { ticket: given, attemptTimeoutMs: 60_000 }; // a busy machine is no refusal
  const channel = `${url.replace("wombat:", "channel:")}/a`;
  const seen = [
    await ended(connect(url, options)),
    await ended(connect(url, options)),
    await ended(joinChannel(channel, { processor: "sender", ...options })),
  ];
  const address = new URL("/v1/logux/notes", url.replace("wombat:", "ws:"));
  address.searchParams.set("ticket", given);
  const socket = new WebSocket(address);
  seen.push(await new Promise((resolve) => (socket.onopen = socket.onclose = ({ type }) => resolve(type))));
  report("done", { seen });
}

/** Return the first state of a client, and what it says of a failure. */
async function ended(client) {
  const state = await new Promise((resolve) => client.on("state", resolve));
  const seen = [state, client.lastError];
  await client.close({ flushMs: 0 });
  return seen;
}

/** Try to get a ticket from Headrace itself, with a token that a page should not have. */
export async function ticketOfPage({ url, report }) {
  const options = { method: "POST", headers: { Authorization: "Bearer a-token" } };
  report("done", { seen: await fetch(url, options).then(({ status }) => status, ({ name }) => name) });
}
