package priv

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// ManifestRights are the capabilities that the DaemonSet names.
var ManifestRights = []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON, unix.CAP_SYS_ADMIN}

// ExecWith replaces this process, root's, by a program that has the given
// capabilities and no way to more, as container runtimes do. It returns only to
// say what is in the way.
func ExecWith(capabilities []uintptr, argv, environ []string) error {
	runtime.LockOSThread() // all of this is the thread's, which exec makes the process's
	for c := uintptr(0); ; c++ {
		if slices.Contains(capabilities, c) {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // the kernel knows no more of them
		}
		if err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("forbid new privileges: %w", err)
	}
	return fmt.Errorf("run %s: %w", argv[0], syscall.Exec(argv[0], argv, environ))
}
