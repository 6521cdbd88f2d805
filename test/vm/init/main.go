//go:build linux

// Command init is the first process of the virtual machine that test/vm starts. It makes the kernel's file systems
// available, loads modules, runs the test binaries of the plan one after the other, tells the host of each line, and
// switches the machine off.
package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// workArg tells the second process, which does the work, from the first.
const workArg = "work"

func main() {
	if len(os.Args) > 1 && os.Args[1] == workArg {
		work()
		return
	}
	// The first process inherits every orphan and does nothing but reap: a test that waits for the end of a process it
	// did not start would wait for ever for one that nobody reaps.
	if err := mountAll(); err != nil {
		fmt.Println("init:", err)
	}
	child, err := os.StartProcess("/init", []string{"/init", workArg}, &os.ProcAttr{
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Env: []string{"PATH=/bin"},
	})
	if err != nil {
		fmt.Println("init:", err)
		off()
	}
	for {
		pid, err := unix.Wait4(-1, nil, 0, nil)
		if pid == child.Pid || err == unix.ECHILD {
			off()
		}
	}
}

func off() {
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {} // the first process must not end
}

// mountAll mounts what a node has. Tests find out about what could not be mounted.
func mountAll() error {
	mounts := []struct{ kind, at, data string }{
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
		{"devtmpfs", "/dev", ""},
		{"tmpfs", "/dev/shm", ""},
		{"tmpfs", "/run", "mode=0755"},
		{"tmpfs", "/tmp", ""},
		{"tmpfs", "/var/lib", "mode=0755"},
		{"bpf", "/sys/fs/bpf", "mode=0700"},
		{"cgroup2", "/sys/fs/cgroup", ""},
	}
	for _, m := range mounts {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, 0, m.data); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.kind, m.at, err)
		}
	}
	return nil
}
