// Runs one scenario in Node: `node node_host.mjs SCENARIO URL`. Reports are lines of JSON.

import { connect } from "../../clients/js/headrace.js";
import * as scenarios from "./scenarios.mjs";

const [scenario, url] = process.argv.slice(2);
const report = (name, facts) => console.log(JSON.stringify([name, facts]));
await scenarios[scenario]({ connect, url, report });
