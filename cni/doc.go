// Package cni is the contract with the container runtime: ADD, DEL, CHECK, GC, STATUS and VERSION of the CNI
// specification, versions 0.3.1 to 1.1.0.
//
// The plugin needs no agent: it opens the maps and the program that the agent has pinned, attaches the program to the
// veth that it makes and writes the endpoint's map entries. All it keeps is an address in package ipam's store and a
// state file of package endpoint, which also takes endpoints away again.
//
// Every operation holds the node's lock: shared for one pod, exclusive for GC, and never while another plugin is
// executed. Waiting for it is bounded and ends in error 11.
package cni
