# Completion of klrl's words in bash: eval "$(klrl completion bash)"
_klrl() {
    local words=() word i joined="" program=${1:-klrl}
    # bash cuts words at = and : (COMP_WORDBREAKS); klrl is asked about whole ones.
    for ((i = 1; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if ((${#words[@]})) && [[ $word == [=:]* || $joined && $word ]]; then
            words[${#words[@]} - 1]+=$word
        else
            words+=("$word")
        fi
        [[ $word == *[=:] ]] && joined=1 || joined=""
    done
    ((${#words[@]})) || words=("")
    local current=${words[${#words[@]} - 1]} kept=""
    # ... and only what follows the last cut is replaced.
    if [[ $COMP_WORDBREAKS == *=* && $current == *[=:]* ]]; then
        kept=${current%"${current##*[=:]}"}
    fi
    COMPREPLY=()
    while IFS= read -r word; do
        [[ $word ]] && COMPREPLY+=("${word#"$kept"}")
    done < <("${program/#\~/$HOME}" completion query -- "${words[@]}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
    return 0
}
complete -o default -F _klrl klrl
