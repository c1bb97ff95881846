// Runs one scenario in Node: `node node_host.mjs SCENARIO URL`. Reports are lines of JSON.

import { joinChannel } from "../../clients/js/channel.js";
import { connectChannels } from "../../clients/js/channel_connection.js";
import { connect } from "../../clients/js/headrace.js";
import * as channelScenarios from "./channel_scenarios.mjs";
import * as scenarios from "./scenarios.mjs";

const [scenario, url] = process.argv.slice(2);
const report = (name, facts) => console.log(JSON.stringify([name, facts]));
const run = { ...scenarios, ...channelScenarios }[scenario];
await run({ connect, connectChannels, joinChannel, url, report });
