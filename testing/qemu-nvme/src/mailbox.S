# The firmware of the guest, 64 KiB below 1 MiB. It carries out one register access at a time
# for the host, and copies doorbells that the host changed in memory to the controller. It knows
# nothing of NVMe, and must not touch memory outside of the mailbox's page.

# Where the mailbox lies, and what its words are. `mailbox.rs` has the same numbers.
        .equ MAILBOX,        0x1000
        .equ REQUEST,        0x00
        .equ ADDRESS,        0x04
        .equ VALUE,          0x08
        .equ ALIVE,          0x0c
        .equ DOORBELLS,      0x10   # the address of the controller's first doorbell
        .equ DOORBELL_COUNT, 0x14
        .equ WANTED,         0x100  # what the host wants each doorbell to be
        .equ WRITTEN,        0x200  # what was last written to it

        .equ WRITE_MEMORY,   1
        .equ READ_MEMORY,    2
        .equ WRITE_PORT,     3
        .equ READ_PORT,      4
        .equ ALIVE_MARK,     0x4e564d65

# The processor sees the image at the end of the first MiB.
        .equ IMAGE,          0xf0000
        .equ IMAGE_SIZE,     0x10000
        .equ RESET_VECTOR,   0xfff0
        .equ CODE_SEGMENT,   0x08
        .equ DATA_SEGMENT,   0x10

        .section .text
        .globl _start
        .code16
_start: cli
        lgdtl %cs:(segments - _start)
        movl  %cr0, %eax
        orl   $1, %eax              # protected mode
        movl  %eax, %cr0
        ljmpl $CODE_SEGMENT, $(IMAGE + (flat - _start))

        .code32
flat:   movw  $DATA_SEGMENT, %ax
        movw  %ax, %ds
        movw  %ax, %es
        movl  $MAILBOX, %esi
        movl  $ALIVE_MARK, ALIVE(%esi)

serve:  movl  REQUEST(%esi), %eax
        testl %eax, %eax
        jz    mirror
        movl  ADDRESS(%esi), %edx
        movl  VALUE(%esi), %ebx
        cmpl  $WRITE_MEMORY, %eax
        je    write_memory
        cmpl  $READ_MEMORY, %eax
        je    read_memory
        cmpl  $WRITE_PORT, %eax
        je    write_port
        inl   %dx, %eax
        movl  %eax, VALUE(%esi)
        jmp   done
write_memory:
        movl  %ebx, (%edx)
        jmp   done
read_memory:
        movl  (%edx), %ebx
        movl  %ebx, VALUE(%esi)
        jmp   done
write_port:
        movl  %ebx, %eax
        outl  %eax, %dx
done:   movl  $0, REQUEST(%esi)     # stored last: the host waits for it

mirror: movl  DOORBELL_COUNT(%esi), %ecx
        testl %ecx, %ecx
        jz    idle
        movl  DOORBELLS(%esi), %edi
        xorl  %ebx, %ebx
next:   movl  WANTED(%esi,%ebx,4), %eax
        cmpl  WRITTEN(%esi,%ebx,4), %eax
        je    same
        movl  %eax, WRITTEN(%esi,%ebx,4)
        movl  %eax, (%edi,%ebx,4)
same:   incl  %ebx
        cmpl  %ecx, %ebx
        jb    next
        jmp   serve
idle:   pause
        jmp   serve

# One flat segment of code and one of data, each of 4 GiB.
        .align 8
table:  .quad 0
        .quad 0x00cf9a000000ffff
        .quad 0x00cf92000000ffff
segments:
        .word segments - table - 1
        .long IMAGE + (table - _start)

        .org  RESET_VECTOR
        .code16
        ljmp  $(IMAGE >> 4), $0
        .org  IMAGE_SIZE
