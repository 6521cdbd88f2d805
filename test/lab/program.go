package lab

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Program runs on a node beside what this project brings, such as another network's daemon. The lab's end ends it.
type Program struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has been reaped
}

// StartProgram starts a program in the node's network namespace and cgroup. What it says goes to NAME.log in the node's directory.
func (n *Node) StartProgram(name, path string, args ...string) (*Program, error) {
	p := &Program{name: name, log: filepath.Join(n.Dir, name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the log of %s on %s: %w", name, n.Name, err)
	}
	defer log.Close()
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	started, err := n.inCgroup(cmd.SysProcAttr)
	if err != nil {
		return nil, err
	}
	defer started()
	if err := n.Do(cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s on %s: %w", name, n.Name, err)
	}
	p.cmd = cmd
	go func() {
		_ = cmd.Wait() // how it ended, its log says
		close(p.done)
	}()
	return p, nil
}

// tail is the end of a log, indented, for error messages.
func tail(log string, lines int) string {
	raw, err := os.ReadFile(log)
	if err != nil {
		return "    (no log: " + err.Error() + ")"
	}
	all := bytes.Split(bytes.TrimRight(raw, "\n"), []byte("\n"))
	return "    " + string(bytes.Join(all[max(0, len(all)-lines):], []byte("\n    ")))
}

// Ended is closed once the program has ended.
func (p *Program) Ended() <-chan struct{} { return p.done }

// Stop ends the program with SIGTERM; its exit status is its own matter.
func (p *Program) Stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(stopTimeout()):
		_ = p.cmd.Process.Kill()
		<-p.done
		return fmt.Errorf("%s did not end within %v of SIGTERM and was killed", p.name, stopTimeout())
	}
}
