package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Machine is one computer of the cluster: namespaces of its own of every kind but the user's, a root file system that
// is the real one with a layer of its own in memory, and a process 1 that starts everything else in it. When process 1
// ends, the kernel ends the rest, and with the last process go the links, the mounts and what was pinned.
type Machine struct {
	Name string
	// Addrs are the machine's addresses on the fabric, one of each family. Addr is that of the cluster's first.
	Addrs []netip.Addr
	Addr  netip.Addr

	dir   string // seen by the machine under the same path
	pid   int
	start uint64
	// lifeline is closed when this process ends, however it ends; process 1 then ends too. A cluster that is kept has none.
	lifeline *os.File
}

// machineRecord is what stands in the file by which a machine is found again.
type machineRecord struct {
	PID int
	// Start is the process's start time, which tells it from another one that has got its number.
	Start uint64
}

const recordFile = "machine.json"

// newMachine makes a machine below the cluster's directory. Its network has nothing but the loopback interface.
func (c *Cluster) newMachine(ctx context.Context, name string, addrs []netip.Addr) (*Machine, error) {
	m := &Machine{Name: name, Addrs: addrs, Addr: addrs[0], dir: filepath.Join(c.Dir, name)}
	for _, dir := range []string{m.dir, filepath.Join(m.dir, rootDir), m.path("log"), m.Manifests()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("make machine %s: %w", name, err)
		}
	}
	return m, c.boot(ctx, m)
}

// boot starts process 1 of a machine and waits until it answers.
func (c *Cluster) boot(ctx context.Context, m *Machine) (err error) {
	setup, release, err := m.spawn(!c.kept())
	if err != nil {
		return fmt.Errorf("start machine %s: %w", m.Name, err)
	}
	defer release()
	defer func() {
		if err != nil {
			_ = m.end(context.WithoutCancel(ctx))
		}
	}()
	if err := m.record(); err != nil {
		return err
	}
	if err := makeCgroups(c.ID, m.Name, m.pid); err != nil {
		return err
	}
	if err := json.NewEncoder(setup).Encode(initConfig{Name: m.Name, Addrs: m.Addrs, ClusterDir: c.Dir, Dir: m.dir, NoBPFFS: c.Options.NoBPFFS}); err != nil {
		return fmt.Errorf("tell machine %s what it is: %w", m.Name, err)
	}
	setup.Close()
	return m.waitUp(ctx)
}

// spawn starts process 1, which waits for its configuration. The first file is where that goes.
func (m *Machine) spawn(mortal bool) (setup *os.File, release func(), err error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer read.Close()
	log, err := os.OpenFile(m.path("log", "init.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, nil, err
	}
	defer log.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{initName}
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{read}
	if mortal {
		end, lifeline, err := os.Pipe()
		if err != nil {
			return nil, nil, err
		}
		defer end.Close()
		m.lifeline = lifeline
		cmd.ExtraFiles = append(cmd.ExtraFiles, end)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET,
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	m.pid = cmd.Process.Pid
	go func() { _ = cmd.Wait() }()
	m.start, err = StartTime(m.pid)
	return write, func() { write.Close() }, err
}

func (m *Machine) record() error {
	raw, err := json.Marshal(machineRecord{PID: m.pid, Start: m.start})
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(m.dir, recordFile), raw, 0o600); err != nil {
		return fmt.Errorf("note the process of machine %s: %w", m.Name, err)
	}
	return nil
}

// StartTime is when a process began, in the kernel's ticks since the machine started; an error when there is none of that number.
func StartTime(pid int) (uint64, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name in parentheses may hold anything, blanks and parentheses too.
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" {
		return 0, fmt.Errorf("process %d has ended", pid)
	}
	var start uint64
	_, err = fmt.Sscan(fields[19], &start)
	return start, err
}

// waitUp waits until process 1 answers.
func (m *Machine) waitUp(ctx context.Context) error {
	return poll(ctx, 20*time.Millisecond, "machine "+m.Name+" is up", func(ctx context.Context) error {
		if _, err := StartTime(m.pid); err != nil {
			return fatal{fmt.Errorf("%w\n%s", err, m.LogTail("init", 20))}
		}
		_, err := m.ask(ctx, request{Verb: verbPing})
		return err
	})
}

// end kills process 1, and with it everything in the machine, and waits until nothing of it is left.
func (m *Machine) end(ctx context.Context) error {
	if m.lifeline != nil {
		defer m.lifeline.Close()
	}
	if m.pid == 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(m.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("end machine %s: %w", m.Name, err)
	}
	defer unix.Close(fd)
	// The descriptor stands for one process: if its start is the one that was noted, it is ours.
	if start, err := StartTime(m.pid); err != nil || start != m.start {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill machine %s: %w", m.Name, err)
	}
	return poll(ctx, 10*time.Millisecond, "machine "+m.Name+" has ended", func(context.Context) error {
		if start, err := StartTime(m.pid); err == nil && start == m.start {
			return fmt.Errorf("process %d is there", m.pid)
		}
		return nil
	})
}

// path is a path below the machine's directory; it is the same inside and outside.
func (m *Machine) path(parts ...string) string {
	return filepath.Join(append([]string{m.dir}, parts...)...)
}

// inRoot is a path of the machine's own file system as this process reaches it.
func (m *Machine) inRoot(path string) string { return fmt.Sprintf("/proc/%d/root%s", m.pid, path) }

// LogTail is the end of what a program wrote, indented, for error messages.
func (m *Machine) LogTail(program string, lines int) string {
	raw, err := os.ReadFile(m.path("log", program+".log"))
	if err != nil {
		return "    (no log: " + err.Error() + ")"
	}
	all := strings.Split(strings.TrimRight(string(raw), "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return "    " + strings.Join(all, "\n    ")
}
