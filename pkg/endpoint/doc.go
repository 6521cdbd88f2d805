// Package endpoint owns what is kept about a pod's attachment, and how all of it is taken away again.
//
// An Endpoint is one JSON file below <stateDir>/endpoints, written by the plugin before the endpoint's map entry and
// removed after everything else: whatever exists of a live endpoint can be found from its file. What a killed ADD
// leaves without a file can be found from names alone: the host-side link's is derived from container id and
// interface, addresses stand in the address store under both, and pins and map entries carry the link's index.
//
// Release undoes an attachment from any state that a kill can leave it in. The plugin's DEL and GC, the agent's
// search for lost DELs and its cleanup all use it.
package endpoint
