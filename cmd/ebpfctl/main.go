// Command ebpfctl shows what the dataplane of a node is doing. It reads nothing
// but the pins and the state directory, so it works with the agent dead.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// version is set when the binary is built.
var version = "unknown"

func main() {
	// A second signal ends the process the usual way.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	info, err := os.Stdout.Stat()
	os.Exit(run(ctx, env{
		stdout:   os.Stdout,
		stderr:   os.Stderr,
		args:     os.Args[1:],
		lookup:   os.LookupEnv,
		terminal: err == nil && info.Mode()&os.ModeCharDevice != 0,
	}))
}
