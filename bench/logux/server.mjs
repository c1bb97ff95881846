// The npm package's server as its documentation sets it up: everyone may come, events go to their channel.
import { Server } from "@logux/server";

const server = new Server({
  subprotocol: 1,
  minSubprotocol: 1,
  host: "127.0.0.1",
  port: Number(process.argv[2]),
  env: "production",
  // Without lines for each action, which nobody would keep in production.
  logger: { info() {}, warn() {}, error: console.error, fatal: console.error, debug() {} },
});

server.auth(() => true);
server.type("bench", {
  access: () => true,
  resend: (ctx, action) => ({ channel: action.channel }),
});
server.channel("bench", { access: () => true });
server.listen();
