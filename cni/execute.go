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

// A program that is being written can't be executed (ETXTBSY): whoever updates a plugin in place is soon done.
const (
	busyWait = 5 * time.Second
	busyPoll = 20 * time.Millisecond
)

// ExecPlugin implements invoke.Exec.
func (e *executor) ExecPlugin(ctx context.Context, path string, conf []byte, environ []string) ([]byte, error) {
	for deadline := time.Now().Add(busyWait); ; {
		out, log, err := e.execute(ctx, path, conf, environ)
		if errors.Is(err, unix.ETXTBSY) && ctx.Err() == nil && time.Now().Before(deadline) {
			time.Sleep(busyPoll)
			continue
		}
		if err == nil || errors.Is(err, exec.ErrWaitDelay) {
			return out, nil
		}
		said := &types.Error{}
		if json.Unmarshal(out, said) != nil {
			said = &types.Error{Msg: fmt.Sprintf("plugin %s: %v, output %q", path, err, append(out, log...))}
		}
		return nil, said
	}
}

func (*executor) execute(ctx context.Context, path string, conf []byte, environ []string) (stdout, stderr []byte, err error) {
	var out, log bytes.Buffer
	cmd := exec.CommandContext(ctx, path)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, bytes.NewReader(conf), &out, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) } // and what it has started
	cmd.WaitDelay = outputWait
	err = cmd.Run()
	return out.Bytes(), log.Bytes(), err
}

// FindInPath implements invoke.Exec.
func (*executor) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}
