package attach

import (
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// linkTCX is BPF_LINK_TYPE_TCX.
const linkTCX = 11

// linkInfo is the beginning of struct bpf_link_info, for a tcx link.
type linkInfo struct {
	kind, id uint32
	program  ebpf.ProgramID
	_        uint32
	ifindex  uint32 // 0: the device is gone, or somebody has detached the link
	hook     uint32
}

// readLink asks for a pinned link, and for nothing else: every pod's is asked for more than once a second. The error
// matches fs.ErrNotExist when nothing is pinned at path.
func readLink(path string) (info linkInfo, err error) {
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		return info, err
	}
	// The addresses in both records are pointers to Go's runtime too, so that they stay valid.
	open := struct {
		path      unsafe.Pointer
		fd, flags uint32
	}{path: unsafe.Pointer(name)}
	fd, err := bpf(unix.BPF_OBJ_GET, unsafe.Pointer(&open), unsafe.Sizeof(open))
	if err != nil {
		return info, err
	}
	ask := struct {
		fd, size uint32
		info     unsafe.Pointer
	}{uint32(fd), uint32(unsafe.Sizeof(info)), unsafe.Pointer(&info)}
	_, err = bpf(unix.BPF_OBJ_GET_INFO_BY_FD, unsafe.Pointer(&ask), unsafe.Sizeof(ask))
	if closeErr := unix.Close(fd); err == nil {
		err = closeErr
	}
	return info, err
}

func bpf(command int, attributes unsafe.Pointer, size uintptr) (int, error) {
	result, _, errno := unix.Syscall(unix.SYS_BPF, uintptr(command), uintptr(attributes), size)
	if errno != 0 {
		return 0, errno
	}
	return int(result), nil
}
