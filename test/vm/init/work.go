//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/vm/wire"
)

// work does what the plan says. What goes wrong here is told as a frame, or, when that fails, on the console.
func work() {
	p, err := openPort()
	if err != nil {
		fmt.Println("init:", err)
		return
	}
	if err := p.run(); err != nil {
		p.send(wire.Frame{Broken: err.Error()})
	} else {
		p.send(wire.Frame{Done: true})
	}
	p.drain()
}

func (p *port) run() error {
	raw, err := os.ReadFile(wire.PlanFile)
	if err != nil {
		return err
	}
	var plan wire.Plan
	if err := json.Unmarshal(raw, &plan); err != nil {
		return fmt.Errorf("read %s: %w", wire.PlanFile, err)
	}
	for _, name := range plan.Modules {
		if err := load(filepath.Join(wire.ModuleDir, name)); err != nil {
			return err
		}
	}
	inUse, err := prepareNetwork()
	if err != nil {
		return err
	}
	defer runtime.KeepAlive(inUse)
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	p.send(wire.Frame{Booted: unix.ByteSliceToString(u.Release[:])})
	for _, s := range plan.Suites {
		p.suite(s, plan.Env)
	}
	return nil
}

func load(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load module %s: %w", path, err)
	}
	return os.Remove(path) // its memory is of more use elsewhere
}

// suite runs one test binary to its end.
func (p *port) suite(s wire.Suite, env []string) {
	started := time.Now()
	ended := wire.Ended{Dir: s.Dir}
	defer func() {
		ended.Seconds = time.Since(started).Seconds()
		p.send(wire.Frame{Ended: &ended})
	}()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(s.Seconds)*time.Second)
	defer cancel()
	dir := filepath.Join(wire.Root, s.Dir)
	cmd := exec.CommandContext(ctx, filepath.Join(dir, s.Binary), s.Args...)
	cmd.Dir, cmd.Env = dir, env
	// Whoever outlives the binary with its output still open is not waited for.
	cmd.WaitDelay = 5 * time.Second
	out, in := io.Pipe()
	cmd.Stdout, cmd.Stderr = in, in
	var copied sync.WaitGroup
	copied.Go(func() { p.lines(out) })
	err := cmd.Run()
	in.Close()
	copied.Wait()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		ended.Status, ended.Error = -1, fmt.Sprintf("killed after %d s", s.Seconds)
	case errors.As(err, &exit):
		ended.Status = exit.ExitCode()
		ended.Error = exit.String()
	case err != nil:
		ended.Status, ended.Error = -1, err.Error()
	}
	p.files(dir, s.Fetch)
}

func (p *port) lines(out io.Reader) {
	r := bufio.NewReader(out)
	for {
		line, err := r.ReadString('\n')
		if line != "" {
			p.send(wire.Frame{Line: &line})
		}
		if err != nil {
			return
		}
	}
}

func (p *port) files(dir, glob string) {
	if glob == "" {
		return
	}
	found, err := filepath.Glob(filepath.Join(dir, glob))
	if err != nil {
		p.send(wire.Frame{Broken: err.Error()})
	}
	for _, path := range found {
		content, err := os.ReadFile(path)
		if err != nil {
			p.send(wire.Frame{Broken: err.Error()})
			continue
		}
		name, _ := filepath.Rel(wire.Root, path)
		p.send(wire.Frame{File: &wire.File{Path: name, Content: content}})
	}
}

// port is the serial port to the host.
type port struct{ file *os.File }

func openPort() (*port, error) {
	f, err := os.OpenFile(wire.Port, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	t, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("ask %s for its settings: %w", wire.Port, err)
	}
	// No translation of line ends, no echo.
	t.Iflag, t.Oflag, t.Lflag = 0, 0, 0
	t.Cflag = unix.CS8 | unix.CREAD | unix.CLOCAL | unix.B115200
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, t); err != nil {
		return nil, fmt.Errorf("set up %s: %w", wire.Port, err)
	}
	return &port{f}, nil
}

func (p *port) send(f wire.Frame) {
	raw, err := json.Marshal(f)
	if err == nil {
		_, err = p.file.Write(append(raw, '\n'))
	}
	if err != nil {
		fmt.Println("init: tell the host:", err)
	}
}

// drain waits until everything has left.
func (p *port) drain() { _ = unix.IoctlSetInt(int(p.file.Fd()), unix.TCSBRK, 1) }
