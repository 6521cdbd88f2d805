// Package endpoint owns a pod's attachment: what it is made of, and what is kept about it.
//
// An endpoint is one table of pieces (see pieces), each of which can be asked for, made and removed. The plugin's ADD
// makes them in order, its CHECK asks for them, the agent makes again what is missing of the host's side, and a release
// takes them away backwards, from any state that a kill can leave them in: the plugin's DEL and GC, the agent's search
// for lost DELs and its cleanup.
//
// An Endpoint is one JSON file below <stateDir>/endpoints, written before the endpoint's map entry and removed after
// everything else: whatever exists of a live endpoint can be found from its file. What a killed ADD leaves without a
// file can be found from names alone: the host-side link's is derived from container id and interface, addresses stand
// in the address store under both, and pins and map entries carry the link's index.
package endpoint
