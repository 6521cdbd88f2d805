// Package cni is the contract with the container runtime: ADD, DEL, CHECK, GC, STATUS and VERSION of the CNI
// specification, versions 0.3.1 to 1.1.0.
//
// The plugin needs no agent: package endpoint opens the maps and the program that the agent has pinned, and makes,
// checks and removes what a pod needs. Here are the parameters and results of the calls, and the choice of who allocates
// addresses: host-local, in process, or another ipam plugin.
//
// Every operation holds the node's lock, shared for one pod, exclusively for GC, but never while another plugin is
// executed. Waiting for it is bounded; on timeout the operation fails with error 11 (try again later).
package cni
