package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// startTimeout is how long a server may take until it answers.
const startTimeout = 20 * time.Second

// Process is an etcd-server of one member in any network namespace. It may be killed and started again, with the data that it had and at
// the same address.
type Process struct {
	// Addr is where its clients find it.
	Addr netip.AddrPort
	// Stays has it outlive the process that starts it. Somebody else then sees to its end.
	Stays bool

	dir string                   // of its data and its log
	in  func(func() error) error // runs a function in its network namespace, on one thread
	// ended is closed once the process is gone; nil before the first start.
	ended chan struct{}
	kill  func() error
}

// New is an etcd-server that is not started yet, with files in a directory, in the network namespace in which in runs functions.
func New(dir string, addr netip.AddrPort, in func(func() error) error) *Process {
	return &Process{Addr: addr, dir: dir, in: in}
}

// URL is what clients take for an endpoint.
func (s *Process) URL() string { return "http://" + s.Addr.String() }

// Start starts the server, and waits until it answers.
func (s *Process) Start(ctx context.Context) error {
	if s.running() {
		return errors.New("start etcd: it runs")
	}
	path, err := priv.Program("etcd")
	if err != nil {
		return err
	}
	log, err := os.OpenFile(s.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open etcd's log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(path, "--data-dir="+s.data(), "--unsafe-no-fsync",
		"--listen-client-urls="+s.URL(), "--advertise-client-urls="+s.URL(), "--listen-peer-urls=http://127.0.0.1:0")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if !s.Stays {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	if err := s.run(cmd); err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	if err := s.answers(ctx); err != nil {
		return fmt.Errorf("start etcd: %w\n%s", errors.Join(err, s.Kill()), s.LogTail())
	}
	return nil
}

// run starts the process, from a thread that lives as long: unless it stays, the kernel ends it with the thread, so also when a test is
// killed.
func (s *Process) run(cmd *exec.Cmd) error {
	started, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := s.in(func() error {
			if err := cmd.Start(); err != nil {
				return err
			}
			started <- nil
			_ = cmd.Wait() // how it ended, its log says
			return nil
		})
		started <- err // of which nobody hears if it was started
	}()
	if err := <-started; err != nil {
		return err
	}
	s.ended, s.kill = ended, cmd.Process.Kill
	return nil
}

// answers waits until the server has elected itself, and answers.
func (s *Process) answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, priv.Patience(startTimeout))
	defer cancel()
	client, err := s.Client()
	if err != nil {
		return err
	}
	defer client.Close()
	for {
		attempt, cancel := context.WithTimeout(ctx, time.Second)
		_, err := client.Get(attempt, "answers")
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-s.ended:
			return errors.New("it has ended")
		case <-ctx.Done():
			return fmt.Errorf("wait for an answer: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *Process) running() bool {
	if s.ended == nil {
		return false
	}
	select {
	case <-s.ended:
		return false
	default:
		return true
	}
}

// Kill ends the server with SIGKILL. One that does not run is no error.
func (s *Process) Kill() error {
	if !s.running() {
		return nil
	}
	if err := s.kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill etcd: %w", err)
	}
	<-s.ended
	return nil
}

// Empty puts a new server without data, as of another cluster, in the place of this one.
func (s *Process) Empty(ctx context.Context) error {
	if err := s.Kill(); err != nil {
		return err
	}
	if err := os.RemoveAll(s.data()); err != nil {
		return fmt.Errorf("empty etcd: %w", err)
	}
	return s.Start(ctx)
}

// Compact has the server forget all revisions but the newest, so that whoever watches from an older one must list again.
func (s *Process) Compact(ctx context.Context) error {
	client, err := s.Client()
	if err != nil {
		return err
	}
	defer client.Close()
	newest, err := client.Get(ctx, "compact")
	if err == nil {
		_, err = client.Compact(ctx, newest.Header.Revision, clientv3.WithCompactPhysical())
	}
	if err != nil {
		return fmt.Errorf("compact etcd: %w", err)
	}
	return nil
}

// Client is a client of the server, to be closed, wherever the caller's network namespace is.
func (s *Process) Client() (*clientv3.Client, error) {
	dial := func(ctx context.Context, addr string) (conn net.Conn, err error) {
		err = s.in(func() (err error) {
			conn, err = new(net.Dialer).DialContext(ctx, "tcp", addr)
			return err
		})
		return conn, err
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{s.URL()}, Logger: zap.NewNop(), DialOptions: []grpc.DialOption{grpc.WithContextDialer(dial)},
	})
	if err != nil {
		return nil, fmt.Errorf("make a client of etcd: %w", err)
	}
	return client, nil
}

func (s *Process) data() string { return filepath.Join(s.dir, "data") }

func (s *Process) log() string { return filepath.Join(s.dir, "etcd.log") }

// LogTail is the end of what the server has said.
func (s *Process) LogTail() string {
	raw, err := os.ReadFile(s.log())
	if err != nil {
		return err.Error()
	}
	lines := bytes.Split(bytes.TrimSpace(raw), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-20):], []byte("\n")))
}
