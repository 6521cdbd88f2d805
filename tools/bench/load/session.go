package load

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// lead is how long before its start both ends learn of a sample.
const lead = 2 * time.Millisecond

// check refuses a Target that can't be measured between.
func (t Target) check() error {
	switch {
	case t.Client == "" || t.Server == "":
		return errors.New("a target needs the paths of the client's and the server's network namespaces")
	case !t.Address.IsValid():
		return errors.New("a target needs the address at which the server is reached")
	case t.ClientCPU < 0 || t.ServerCPU < 0:
		return fmt.Errorf("CPUs %d and %d: a CPU's number is not negative", t.ClientCPU, t.ServerCPU)
	case t.Duration < 0 || t.Warmup < 0:
		return fmt.Errorf("duration %s, warm-up %s: a time is not negative", t.Duration, t.Warmup)
	}
	return nil
}

// process is the process of one end.
type process struct {
	name    string
	cmd     *exec.Cmd
	in      io.WriteCloser
	kill    context.CancelFunc
	reports chan report // closed when the process has ended
	err     error       // how it ended; to be read after that
}

// launch starts an end. It ends with ctx, and with the process that started it.
func launch(ctx context.Context, name string, page *os.File) (*process, error) {
	ctx, kill := context.WithCancel(ctx)
	p := &process{name: name, kill: kill, reports: make(chan report, 16)}
	p.cmd = exec.CommandContext(ctx, "/proc/self/exe", WorkerCommand)
	p.cmd.Args[0] = os.Args[0]
	p.cmd.ExtraFiles = []*os.File{page}
	// Go's runtime has little to do in there, and is to leave the loop alone.
	p.cmd.Env = append(os.Environ(), "GOGC=off", "GOMAXPROCS=2", "GODEBUG=asyncpreemptoff=1")
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var complaints bytes.Buffer
	p.cmd.Stderr = &complaints
	in, err := p.cmd.StdinPipe()
	if err != nil {
		kill()
		return nil, fmt.Errorf("start the %s: %w", name, err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		kill()
		return nil, fmt.Errorf("start the %s: %w", name, err)
	}
	p.in = in

	started := make(chan error)
	go func() {
		// Pdeathsig is sent when the thread ends that started the process: it must not before the process does.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		lines := json.NewDecoder(out)
		for {
			var r report
			if err := lines.Decode(&r); err != nil {
				break
			}
			p.reports <- r
		}
		if err := p.cmd.Wait(); err != nil {
			p.err = fmt.Errorf("%w; it wrote: %q", err, strings.TrimSpace(complaints.String()))
		}
		close(p.reports)
	}()
	if err := <-started; err != nil {
		kill()
		return nil, fmt.Errorf("start the %s: %w", name, err)
	}
	return p, nil
}

// tell sends a message to the end.
func (p *process) tell(m message) error {
	line, err := json.Marshal(m)
	if err == nil {
		_, err = p.in.Write(append(line, '\n'))
	}
	if err != nil {
		return fmt.Errorf("tell the %s what to do: %w", p.name, err)
	}
	return nil
}

// next waits for a report.
func (p *process) next(ctx context.Context) (report, error) {
	select {
	case r, ok := <-p.reports:
		switch {
		case !ok && ctx.Err() != nil:
			return report{}, fmt.Errorf("wait for the %s: %w", p.name, context.Cause(ctx))
		case !ok:
			return report{}, fmt.Errorf("the %s ended without a report: %w", p.name, errors.Join(p.err))
		case r.NotMeasured:
			return report{}, fmt.Errorf("%s: %w", p.name, unmeasured("%s", strings.TrimPrefix(r.Error, ErrNotMeasured.Error()+": ")))
		case r.Error != "":
			return report{}, fmt.Errorf("%s: %s", p.name, r.Error)
		}
		return r, nil
	case <-ctx.Done():
		return report{}, fmt.Errorf("wait for the %s: %w", p.name, context.Cause(ctx))
	}
}

// end kills the process, if it has not ended, and waits until it is gone.
func (p *process) end() {
	p.kill()
	for range p.reports { // what is left of them
	}
	p.in.Close()
}

// session is both ends of a sample.
type session struct {
	client, server *process
	page           *os.File
}

// begin starts both ends and returns when the path between them is known to work.
func begin(ctx context.Context, t Target, client, server order) (_ *session, err error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("ebpf-cni-load", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make the memory that both ends share: %w", err)
	}
	s := &session{page: os.NewFile(uintptr(fd), "memory that both ends share")}
	defer func() {
		if err != nil {
			s.end()
		}
	}()
	if err := s.page.Truncate(sharedSize); err != nil {
		return nil, fmt.Errorf("make the memory that both ends share: %w", err)
	}
	if s.server, err = launch(ctx, server.Work, s.page); err != nil {
		return nil, err
	}
	if s.client, err = launch(ctx, client.Work, s.page); err != nil {
		return nil, err
	}
	server.Netns, server.CPU, server.Address = t.Server, t.ServerCPU, t.Address
	if err := s.server.tell(message{Order: &server}); err != nil {
		return nil, err
	}
	place, err := s.server.next(ctx)
	if err != nil {
		return nil, err
	}
	client.Netns, client.CPU, client.Address, client.Port = t.Client, t.ClientCPU, t.Address, place.Port
	if err := s.client.tell(message{Order: &client}); err != nil {
		return nil, err
	}
	if _, err := s.client.next(ctx); err != nil {
		return nil, s.blame(err)
	}
	return s, nil
}

// blame adds what the server had to say to an error of the client's.
func (s *session) blame(err error) error {
	select {
	case r, ok := <-s.server.reports:
		if ok && r.Error != "" {
			return fmt.Errorf("%w (%s: %s)", err, s.server.name, r.Error)
		}
	default:
	}
	return err
}

func (s *session) end() {
	for _, p := range []*process{s.client, s.server} {
		if p != nil {
			p.end()
		}
	}
	s.page.Close()
}

// sample runs one sample from its beginning to its end.
func sample(ctx context.Context, t Target, client, server order) (c, s report, err error) {
	if t.Duration <= 0 {
		return c, s, fmt.Errorf("duration %s: a sample takes some time", t.Duration)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, t.Warmup+t.Duration+4*patience,
		unmeasured("it has not ended %s after its time", 4*patience))
	defer cancel()
	ends, err := begin(ctx, t, client, server)
	if err != nil {
		return c, s, err
	}
	defer ends.end()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return c, s, fmt.Errorf("read the clock: %w", err)
	}
	w := &window{Start: now.Nano() + int64(lead)}
	w.Begin = w.Start + int64(t.Warmup)
	w.End = w.Begin + int64(t.Duration)
	for _, p := range []*process{ends.server, ends.client} {
		if err := p.tell(message{Window: w}); err != nil {
			return c, s, err
		}
	}
	if c, err = ends.client.next(ctx); err != nil {
		return c, s, ends.blame(err)
	}
	_ = ends.server.tell(message{Stop: true}) // some end by themselves, and can't be told
	s, err = ends.server.next(ctx)
	return c, s, err
}
