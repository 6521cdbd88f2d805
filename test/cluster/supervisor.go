package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// socketFile is where process 1 takes requests, one a connection.
const socketFile = "init.sock"

type verb string

const (
	verbPing   verb = "ping"
	verbStart  verb = "start"  // a program that goes on
	verbSignal verb = "signal" // to a program that was started
	verbStatus verb = "status" // whether a program runs
	verbWait   verb = "wait"   // until a program has ended
	verbRun    verb = "run"    // a program that ends, for its output
	verbDial   verb = "dial"   // a connection
)

type request struct {
	Verb   verb
	Name   string
	Argv   []string
	Env    []string
	Log    string // a file
	Signal syscall.Signal
	// To is what a connection is to, From its port; 0: any.
	Network, To string
	From        uint16
}

type response struct {
	Error  string
	Errno  syscall.Errno // why there is no connection, if the kernel has said so
	PID    int           // in the machine; 0: the program has ended
	Status int           // of one that has ended
	Output []byte
}

// supervisor starts the machine's programs and reaps all processes that lose their parents.
type supervisor struct {
	mu       sync.Mutex
	programs map[string]*program
	byPID    map[int]*program
}

type program struct {
	pid    int
	status int // once ended is closed
	ended  chan struct{}
}

func newSupervisor() *supervisor {
	return &supervisor{programs: map[string]*program{}, byPID: map[int]*program{}}
}

// reap waits for processes for ever. It asks before it takes: so a program is always noted before it is gone.
func (s *supervisor) reap() {
	for {
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil); errors.Is(err, unix.ECHILD) {
			s.pause()
			continue
		}
		s.mu.Lock()
		for {
			var status unix.WaitStatus
			pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil || pid <= 0 {
				break
			}
			s.bury(pid, status)
		}
		s.mu.Unlock()
	}
}

func (s *supervisor) bury(pid int, status unix.WaitStatus) {
	p := s.byPID[pid]
	if p == nil {
		return
	}
	delete(s.byPID, pid)
	p.status = status.ExitStatus()
	if status.Signaled() {
		p.status = 128 + int(status.Signal())
	}
	close(p.ended)
}

// answer serves one connection.
func (s *supervisor) answer(conn net.Conn) {
	defer conn.Close()
	var r request
	if err := json.NewDecoder(conn).Decode(&r); err != nil {
		return
	}
	if r.Verb == verbDial {
		handOver(conn.(*net.UnixConn), r)
		return
	}
	answer, err := s.do(r)
	if err != nil {
		answer.Error = err.Error()
	}
	_ = json.NewEncoder(conn).Encode(answer)
}

func (s *supervisor) do(r request) (response, error) {
	switch r.Verb {
	case verbPing:
		return response{}, nil
	case verbStart:
		log, err := os.OpenFile(r.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return response{}, err
		}
		defer log.Close()
		p, err := s.start(r, log)
		if err != nil {
			return response{}, err
		}
		return response{PID: p.pid}, nil
	case verbRun:
		return s.capture(r)
	}
	s.mu.Lock()
	p := s.programs[r.Name]
	s.mu.Unlock()
	if p == nil {
		return response{}, fmt.Errorf("%s was never started", r.Name)
	}
	if r.Verb == verbWait {
		<-p.ended
	}
	select {
	case <-p.ended:
		return response{Status: p.status}, nil
	default:
	}
	if r.Verb == verbSignal {
		return response{PID: p.pid}, syscall.Kill(p.pid, r.Signal)
	}
	return response{PID: p.pid}, nil
}

// start starts a program; a second one of a name only when the first has ended.
func (s *supervisor) start(r request, output *os.File) (*program, error) {
	path, err := exec.LookPath(r.Argv[0])
	if err != nil {
		return nil, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.programs[r.Name]; p != nil && r.Name != "" {
		select {
		case <-p.ended:
		default:
			return nil, fmt.Errorf("%s is running", r.Name)
		}
	}
	process, err := os.StartProcess(path, r.Argv, &os.ProcAttr{
		Dir: "/", Env: r.Env, Files: []*os.File{null, output, output},
		Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return nil, err
	}
	p := &program{pid: process.Pid, ended: make(chan struct{})}
	_ = process.Release()
	s.byPID[p.pid] = p
	if r.Name != "" {
		s.programs[r.Name] = p
	}
	return p, nil
}

// capture runs a program to its end.
func (s *supervisor) capture(r request) (response, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return response{}, err
	}
	defer read.Close()
	p, err := s.start(r, write)
	write.Close()
	if err != nil {
		return response{}, err
	}
	var output bytes.Buffer
	if _, err := output.ReadFrom(read); err != nil {
		return response{}, err
	}
	<-p.ended
	return response{Status: p.status, Output: output.Bytes()}, nil
}

// ask sends a request to the machine's process 1.
func (m *Machine) ask(ctx context.Context, r request) (response, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", m.path(socketFile))
	if err != nil {
		return response{}, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return response{}, fmt.Errorf("%s on %s: %w", r.Verb, m.Name, err)
	}
	var answer response
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return response{}, fmt.Errorf("%s %s on %s: %w", r.Verb, r.Name, m.Name, err)
	}
	if answer.Error != "" {
		return answer, fmt.Errorf("%s %s on %s: %s", r.Verb, r.Name, m.Name, answer.Error)
	}
	return answer, nil
}

// pause waits for a child to come into being.
func (s *supervisor) pause() { time.Sleep(10 * time.Millisecond) }
