// Package endpoint owns a pod's attachment: what it consists of, and its state file.
//
// An endpoint is a table of pieces (see pieces), each of which can be checked, made and removed. The plugin's ADD makes
// them in order, its CHECK checks them, the agent makes missing pieces of the host's side again, and a release removes
// them in reverse, from any state that a killed process can leave behind. The plugin's DEL and GC release endpoints, as
// do the agent's search for lost DELs and its cleanup.
//
// The state file of an Endpoint is JSON below <stateDir>/endpoints. It is written before the endpoint's map entry and
// removed last, so everything that exists of a live endpoint can be found from it. What a killed ADD leaves without a
// file can be found by name: that of the host-side link is derived from container id and interface, the address store
// has both, and pins and map entries have the link's index.
package endpoint
