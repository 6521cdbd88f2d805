// Command ebpf-agent is the node daemon: it loads the dataplane, keeps it in
// step with the cluster's Nodes and repairs what is removed under it.
package main

import (
	"context"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// version is set by the linker.
var version = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	status := run(ctx, env{
		stdout: os.Stdout, stderr: os.Stderr, args: os.Args[1:], lookup: os.LookupEnv, hostname: os.Hostname,
		executable: os.Executable, findCgroup: agent.FindCgroup, run: agent.Run, cleanup: agent.Cleanup,
		cleanKubeProxy: agent.CleanupKubeProxy,
	})
	stop()
	os.Exit(status)
}
