// Command ebpf-cni is the CNI plugin that the container runtime executes. See package cni.
package main

import "github.com/ebpf-cni/ebpf-cni/cni"

// version is set by the build.
var version = "unknown"

func main() { cni.Main(version) }
