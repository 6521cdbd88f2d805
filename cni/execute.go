package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"
)

// executor executes another plugin until ctx ends. The library's own would wait for as long as any process that the
// plugin has started keeps its output open.
type executor struct {
	version.PluginDecoder
}

var _ invoke.Exec = (*executor)(nil)

// outputWait is how long the output of a plugin that has ended may stay open.
const outputWait = time.Second

// ExecPlugin implements invoke.Exec.
func (*executor) ExecPlugin(ctx context.Context, path string, conf []byte, environ []string) ([]byte, error) {
	var out, log bytes.Buffer
	cmd := exec.CommandContext(ctx, path)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, bytes.NewReader(conf), &out, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) } // and what it has started
	cmd.WaitDelay = outputWait
	err := cmd.Run()
	if err == nil || errors.Is(err, exec.ErrWaitDelay) {
		return out.Bytes(), nil
	}
	said := &types.Error{}
	if json.Unmarshal(out.Bytes(), said) != nil {
		said = &types.Error{Msg: fmt.Sprintf("plugin %s: %v, output %q", path, err, append(out.Bytes(), log.Bytes()...))}
	}
	return nil, said
}

// FindInPath implements invoke.Exec.
func (*executor) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}
