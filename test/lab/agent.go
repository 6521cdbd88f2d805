package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// agentListen is the agent's default listener. Each node has a loopback of its own, so all can have the same.
const agentListen = "127.0.0.1:9965"

// stopTimeout is how long an agent may take to end after SIGTERM before it is killed. The promise is one second;
// tests of that measure it themselves.
func stopTimeout() time.Duration { return priv.Patience(10 * time.Second) }

// agent is a running agent process.
type agent struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has been reaped; err is set then
	err  error
}

// AgentArgs is the command line that StartAgent gives to the agent, for tests that run one by themselves.
func (n *Node) AgentArgs(flags ...string) []string {
	args := append(n.sourceFlags(),
		"--node-name="+n.Name,
		"--bpffs="+n.BPFFS(),
		"--state-dir="+n.StateDir(),
		"--cni-conf-dir="+n.ConfDir(),
		"--cni-bin-dir="+n.CNIBinDir(),
		"--services=off", // by default: most tests are about what pods do without
	)
	args = append(args, n.lab.Options.AgentFlags...)
	return append(args, flags...)
}

// sourceFlags say where the agent learns of Nodes.
func (n *Node) sourceFlags() []string {
	switch {
	case n.Etcd != "":
		return []string{"--registry=etcd", "--etcd-endpoints=" + n.Etcd, "--subnet-file=" + n.SubnetFile()}
	case n.Kubeconfig != "":
		return []string{"--kubeconfig=" + n.Kubeconfig}
	}
	return []string{"--nodes-file=" + n.lab.NodesFile()}
}

// AgentPath is the agent's executable.
func (n *Node) AgentPath() (string, error) { return n.lab.Binary("ebpf-agent") }

// StartAgent starts the node's agent. It does not wait for it: see WaitReady.
func (n *Node) StartAgent(flags ...string) error {
	path, err := n.AgentPath()
	if err != nil {
		return err
	}
	return n.StartAgentBinary(path, flags...)
}

// StartAgentBinary starts another build of the agent, for tests of upgrades.
func (n *Node) StartAgentBinary(path string, flags ...string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.agent != nil && !n.agent.ended() {
		return fmt.Errorf("start the agent of %s: one is running", n.Name)
	}
	log, err := os.OpenFile(n.AgentLog(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the log of %s: %w", n.Name, err)
	}
	defer log.Close()
	cmd := exec.Command(path, n.AgentArgs(flags...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), n.cgroupVariable()}
	// A group of its own: an interrupt at the terminal is for us, and we stop the agents in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	started, err := n.inCgroup(cmd.SysProcAttr)
	if err != nil {
		return err
	}
	defer started()
	if err := n.Do(cmd.Start); err != nil {
		return fmt.Errorf("start the agent of %s: %w", n.Name, err)
	}
	a := &agent{cmd: cmd, done: make(chan struct{})}
	go func() {
		a.err = cmd.Wait()
		close(a.done)
	}()
	n.agent = a
	return nil
}

func (a *agent) ended() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

func (n *Node) currentAgent() *agent {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.agent
}

// AgentRunning says whether the agent that was started has not ended yet.
func (n *Node) AgentRunning() bool {
	a := n.currentAgent()
	return a != nil && !a.ended()
}

// AgentPID is the process id of the running agent, 0 when there is none.
func (n *Node) AgentPID() int {
	if a := n.currentAgent(); a != nil && !a.ended() {
		return a.cmd.Process.Pid
	}
	return 0
}

// StopAgent ends the agent with SIGTERM and says how long it took. An exit status other than 0 is an error.
func (n *Node) StopAgent() (time.Duration, error) {
	a := n.currentAgent()
	if a == nil {
		return 0, fmt.Errorf("stop the agent of %s: it was never started", n.Name)
	}
	started := time.Now()
	if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return 0, fmt.Errorf("stop the agent of %s: %w", n.Name, err)
	}
	select {
	case <-a.done:
	case <-time.After(stopTimeout()):
		_ = a.cmd.Process.Kill()
		<-a.done
		return time.Since(started), fmt.Errorf("the agent of %s did not end within %v of SIGTERM and was killed\n%s", n.Name, stopTimeout(), n.LogTail(20))
	}
	if a.err != nil {
		return time.Since(started), fmt.Errorf("the agent of %s ended with %w\n%s", n.Name, a.err, n.LogTail(20))
	}
	return time.Since(started), nil
}

// KillAgent ends the agent with SIGKILL.
func (n *Node) KillAgent() error {
	a := n.currentAgent()
	if a == nil {
		return fmt.Errorf("kill the agent of %s: it was never started", n.Name)
	}
	if err := a.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill the agent of %s: %w", n.Name, err)
	}
	<-a.done
	return nil
}

// WaitReady waits until the agent says that it is ready and the network configuration list is in place. When it ends
// instead, or the context does, the error carries the last lines of its log.
func (n *Node) WaitReady(ctx context.Context) error {
	a := n.currentAgent()
	if a == nil {
		return fmt.Errorf("wait for the agent of %s: it was never started", n.Name)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		reason := n.notReady(ctx)
		if reason == nil {
			return nil
		}
		select {
		case <-a.done:
			return fmt.Errorf("the agent of %s ended before it was ready: %v\n%s", n.Name, a.err, n.LogTail(30))
		case <-ctx.Done():
			return fmt.Errorf("the agent of %s is not ready: %w; last answer: %w\n%s", n.Name, ctx.Err(), reason, n.LogTail(30))
		case <-tick.C:
		}
	}
}

func (n *Node) notReady(ctx context.Context) error {
	status, body, err := n.HTTPGet(ctx, "/readyz")
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("/readyz answers %d: %s", status, bytes.TrimSpace(body))
	}
	if _, err := os.Stat(n.Conflist()); err != nil && !n.Bridged {
		return fmt.Errorf("/readyz answers 200, but: %w", err)
	}
	return nil
}

// StartAgents starts every node's agent and waits until all are ready.
func (l *Lab) StartAgents(ctx context.Context, flags ...string) error {
	for _, node := range l.Nodes {
		if err := node.StartAgent(flags...); err != nil {
			return err
		}
	}
	for _, node := range l.Nodes {
		if err := node.WaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

// signalAgent sends a signal to the agent, if there is one.
func (n *Node) signalAgent(signal os.Signal) {
	if a := n.currentAgent(); a != nil && !a.ended() {
		_ = a.cmd.Process.Signal(signal)
	}
}

// endAgent waits for an agent that has been told to end, and kills it when it does not.
func (n *Node) endAgent() error {
	a := n.currentAgent()
	if a == nil {
		return nil
	}
	select {
	case <-a.done:
		return nil
	case <-time.After(stopTimeout()):
		_ = a.cmd.Process.Kill()
		<-a.done
		return fmt.Errorf("the agent of %s did not end within %v and was killed", n.Name, stopTimeout())
	}
}

// LogTail is the end of the agent's log, indented, for error messages.
func (n *Node) LogTail(lines int) string { return tail(n.AgentLog(), lines) }
