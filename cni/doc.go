// Package cni is the contract with the container runtime: ADD, DEL, CHECK, GC, STATUS and VERSION of the CNI
// specification, versions 0.3.1 to 1.1.0.
//
// The plugin needs no agent: package endpoint opens the maps and the program that the agent has pinned, and makes,
// compares and removes what a pod needs. What stands here is what the runtime says and is told, and who gives addresses.
//
// Every operation holds the node's lock: shared for one pod, exclusive for GC, and never while another plugin is
// executed. Waiting for it is bounded and ends in error 11.
package cni
